"""Tests of the files of torchvision, open_clip, DINOv2 and DINO."""

import collections

import numpy as np
import pytest
import references
from references import (
  DEPTH,
  HEADS,
  PATCH,
  SIZE,
  WIDTH,
  same_results,
  timm_vit,
  torch,
)

from vit_jax import load_pretrained
from vit_jax.data.augment.presets import IMAGENET, NONE
from vit_jax.weights.patch_embedding import CLIP

torchvision = pytest.importorskip('torchvision')
nn = torch.nn
OTHER = (12, 20)  # (height, width), smaller and not square


def torchvision_vit(size=SIZE):
  torch.manual_seed(0)
  return references.noisy(
    torchvision.models.VisionTransformer(
      image_size=size,
      patch_size=PATCH,
      num_layers=DEPTH,
      num_heads=HEADS,
      hidden_dim=WIDTH,
      mlp_dim=2 * WIDTH,
      num_classes=7,
    )
  )


def test_vits_of_torchvision(tmp_path):
  """At the own size, and with the library's interpolation at another one."""
  path = str(tmp_path / 'vit_b_16-c867db91.pth')
  reference = torchvision_vit()
  torch.save(reference.state_dict(), path)
  same_results(path, reference, (SIZE, SIZE), IMAGENET, 1e-5, num_heads=HEADS)
  resize = torchvision.models.vision_transformer.interpolate_embeddings
  state = collections.OrderedDict(reference.state_dict())
  larger = torchvision_vit(24)
  larger.load_state_dict(resize(24, PATCH, state))
  same_results(path, larger, (24, 24), IMAGENET, num_heads=HEADS)


@pytest.mark.parametrize('size, limit', [((64, 64), 1e-5), ((64, 96), 1e-4)])
def test_swins_of_torchvision(tmp_path, size, limit):
  torch.manual_seed(0)
  reference = references.noisy(
    torchvision.models.SwinTransformer(
      patch_size=[4, 4],
      embed_dim=16,
      depths=[2, 2],
      num_heads=[2, 4],
      window_size=[4, 4],
      num_classes=7,
    )
  )
  path = str(tmp_path / 'swin_t-704ceda3.pth')
  torch.save({'model': reference.state_dict()}, path)
  same_results(path, reference, size, IMAGENET, limit)


class CLIPTower(nn.Module):
  """The image tower of open_clip, written from its parameters' names.

  open_clip is not installed here; layers are PyTorch's own, in which attention
  is `nn.MultiheadAttention`.
  """

  def __init__(self):
    super().__init__()
    self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
    self.class_embedding = nn.Parameter(torch.randn(WIDTH))
    count = (SIZE // PATCH) ** 2
    self.positional_embedding = nn.Parameter(torch.randn(count + 1, WIDTH))
    self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    self.proj = nn.Parameter(torch.randn(WIDTH, 5))
    self.transformer = nn.Module()
    self.transformer.resblocks = nn.ModuleList(
      nn.ModuleDict(
        dict(
          ln_1=nn.LayerNorm(WIDTH),
          attn=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
          ln_2=nn.LayerNorm(WIDTH),
          mlp=nn.ModuleDict(
            dict(
              c_fc=nn.Linear(WIDTH, 2 * WIDTH),
              gelu=nn.GELU(),
              c_proj=nn.Linear(2 * WIDTH, WIDTH),
            )
          ),
        )
      )
      for _ in range(DEPTH)
    )

  def forward(self, x):
    x = self.conv1(x).flatten(2).transpose(1, 2)
    cls = self.class_embedding.expand(len(x), 1, -1)
    x = self.ln_pre(torch.cat([cls, x], dim=1) + self.positional_embedding)
    for block in self.transformer.resblocks:
      y = block['ln_1'](x)
      x = x + block['attn'](y, y, y, need_weights=False)[0]
      y = block['ln_2'](x)
      for layer in block['mlp'].values():
        y = layer(y)
      x = x + y
    return self.ln_post(x[:, 0]) @ self.proj


def test_image_towers_of_open_clip(tmp_path):
  """Next to a text tower; the projection is the head."""
  torch.manual_seed(0)
  reference = references.noisy(CLIPTower())
  model = nn.Module()
  model.visual, model.token_embedding = reference, nn.Embedding(9, 8)
  path = str(tmp_path / 'open_clip_pytorch_model.bin')
  torch.save(model.state_dict(), path)
  same_results(path, reference, (SIZE, SIZE), CLIP, 1e-5, num_heads=HEADS)


@pytest.mark.parametrize('size, limit', [((SIZE, SIZE), 1e-5), (OTHER, 1e-4)])
def test_teachers_of_dinov2_in_chunks(tmp_path, size, limit):
  """Next to their heads and a mask token."""
  reference = timm_vit(
    'vit_small_patch14_dinov2', num_classes=0, dynamic_img_size=True
  )
  state = {
    name.replace('blocks.1.', 'blocks.1.1.').replace(
      'blocks.0.', 'blocks.0.0.', 1
    ): leaf
    for name, leaf in reference.state_dict().items()
  }
  teacher = {f'backbone.{name}': leaf for name, leaf in state.items()}
  teacher['backbone.mask_token'] = torch.zeros(1, WIDTH)
  teacher['dino_head.mlp.0.weight'] = torch.zeros(3, 3)
  path = str(tmp_path / 'dinov2_teacher_checkpoint.pth')
  torch.save({'teacher': teacher}, path)
  # timm interpolates with antialiasing, and the authors do not.
  keys = dict(num_heads=HEADS, position_resize='bicubic')
  same_results(path, reference, size, IMAGENET, limit, **keys)


@pytest.mark.parametrize('channels', [1, 5])
@pytest.mark.parametrize('name', ['vit', 'swin'])
def test_images_with_other_channels(tmp_path, channels, name):
  """One mean for all channels, or [-1, 1]."""
  if name == 'vit':
    reference = timm_vit(in_chans=channels)
  else:
    sizes = dict(embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4)
    torch.manual_seed(0)
    reference = references.noisy(
      references.timm.create_model(
        'swin_tiny_patch4_window7_224', img_size=64, in_chans=channels, **sizes
      )
    )
  size = SIZE if name == 'vit' else 64
  config = dict(
    architecture='x',
    model_args={'num_heads': HEADS} if name == 'vit' else {},
    pretrained_cfg=dict(mean=[0.4], std=[0.3]),
  )
  path = references.timm_file(tmp_path, reference, config)
  loaded = load_pretrained(path)
  assert loaded.model.channels == channels
  x = references.images(size)[..., :1].repeat(channels, -1)
  x[..., 0] *= 0.5
  pixels = (((x + 1) / 2 - 0.4) / 0.3).transpose(0, 3, 1, 2)
  with torch.no_grad():
    expected = reference(torch.from_numpy(pixels.astype(np.float32))).numpy()
  ours = references.jitted(loaded.model)(loaded.params, x)
  assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()
  pixels = np.zeros((size, size, channels), np.uint8)
  shape = (*loaded.image_size, channels)
  assert loaded.preprocess(pixels).shape == shape


def test_statistics_of_rgb_do_not_apply_to_other_channels(tmp_path, caplog):
  """The log says so, and three numbers are required for RGB."""
  reference = timm_vit(in_chans=1)
  config = dict(
    architecture='vit_base_patch16_224',
    pretrained_cfg=dict(mean=IMAGENET[0], std=IMAGENET[1]),
  )
  path = references.timm_file(tmp_path, reference, config)
  loaded = load_pretrained(path, num_heads=HEADS)
  assert loaded.model.normalization == ((0.5,), (0.5,))
  assert 'mean and std of its channels are unknown' in caplog.text
  assert NONE[0] == (0.5,) * 3
