"""Tests of the files of torchvision, open_clip, DINOv2 and DINOv3."""

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

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
  'size, limit', [((64, 96), 1e-4), *further([(64, 64), 1e-5])]
)
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


# Names of open_clip for those of timm, whose model computes the same
OPEN_CLIP = {
  'cls_token': 'class_embedding',
  'pos_embed': 'positional_embedding',
  'patch_embed.proj': 'conv1',
  'norm_pre': 'ln_pre',
  'blocks': 'transformer.resblocks',
  'norm1': 'ln_1',
  'norm2': 'ln_2',
  'attn.qkv.': 'attn.in_proj_',
  'attn.proj': 'attn.out_proj',
  'mlp.fc1': 'mlp.c_fc',
  'mlp.fc2': 'mlp.c_proj',
}


@pytest.mark.slow
def test_image_towers_of_open_clip(tmp_path):
  """Next to a text tower; the projection is the head."""
  reference = timm_vit('vit_base_patch16_clip_224')
  nn.init.zeros_(reference.head.bias)
  state = {'token_embedding.weight': torch.ones(9, 8)}
  for name, leaf in reference.state_dict().items():
    for timms, theirs in OPEN_CLIP.items():
      name = name.replace(timms, theirs)
    name = f'visual.{name}'.replace('visual.norm.', 'visual.ln_post.')
    state[name] = leaf[0] if name.endswith('_embedding') else leaf
  state['visual.class_embedding'] = reference.cls_token[0, 0]
  state['visual.proj'] = state.pop('visual.head.weight').T
  del state['visual.head.bias']
  path = str(tmp_path / 'open_clip_pytorch_model.bin')
  torch.save(state, path)
  same_results(path, reference, (SIZE, SIZE), CLIP, 1e-5, num_heads=HEADS)


def open_clip_model(timm_sizes=None, custom=False, quick_gelu=False, **keys):
  """Returns a small model of images and texts of the library."""
  open_clip = pytest.importorskip('open_clip')
  sizes = dict(layers=DEPTH, width=WIDTH, head_width=WIDTH // HEADS)
  sizes |= dict(patch_size=PATCH, image_size=SIZE, mlp_ratio=2.0)
  text = dict(context_length=7, vocab_size=9, width=32, heads=4, layers=1)
  create = references.timm.create_model
  kind = open_clip.model.CustomTextCLIP if custom else open_clip.model.CLIP
  torch.manual_seed(0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      open_clip.timm_model.timm,
      'create_model',
      lambda name, **options: create(name, **options, **timm_sizes),
    )
    return references.noisy(kind(24, sizes | keys, text, quick_gelu))


def open_clip_file(folder, model):
  path = str(folder / 'open_clip_pytorch_model.bin')
  torch.save(model.state_dict(), path)
  return path


GAP = dict(pool='gap', class_token=True)


@pytest.mark.parametrize(
  'changes, keys',
  [
    ({}, {}),
    (dict(custom=True), {}),  # another place of the text tower
    (dict(quick_gelu=True), dict(gelu='quick')),
    (dict(pool_type='avg'), GAP),
    (dict(final_ln_after_pool=True), {}),
    (dict(ls_init_value=0.1), {}),
    (dict(patch_dropout=0.5), {}),
    (dict(no_ln_pre=True, pool_type='avg'), GAP | dict(norm_eps=1e-5)),
  ],
)
def test_towers_of_open_clip(tmp_path, changes, keys):
  """At the own size, and with the library's interpolation at another one."""
  reference, larger = (
    open_clip_model(**changes),
    open_clip_model(**changes, image_size=OTHER),
  )
  from open_clip.model import resize_pos_embed

  path = open_clip_file(tmp_path, reference)
  keys = dict(num_heads=HEADS) | keys
  same_results(path, reference.visual, (SIZE, SIZE), CLIP, 1e-5, **keys)
  state = dict(reference.state_dict())
  resize_pos_embed(state, larger)
  larger.load_state_dict(state)
  same_results(path, larger.visual, OTHER, CLIP, 1e-4, **keys)


TIMM_SIZES = dict(embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS)
TIMM_SIZES |= dict(patch_size=PATCH, dynamic_img_size=True)


@pytest.mark.parametrize(
  'name, pool, projection, bias',
  [
    ('vit_base_patch16_siglip_224', 'map', 'none', False),
    ('vit_base_patch16_224', 'token', 'linear', False),
    ('vit_base_patch16_224', '', 'linear', True),
    ('vit_medium_patch16_gap_256', 'avg', 'linear', False),
  ],
)
def test_towers_of_timm_in_open_clip(tmp_path, name, pool, projection, bias):
  """The projection is the head."""
  reference = open_clip_model(
    TIMM_SIZES,
    custom=True,
    timm_model_name=name,
    timm_pool=pool,
    timm_proj=projection,
    timm_proj_bias=bias,
  )
  path = open_clip_file(tmp_path, reference)
  keys = dict(num_heads=HEADS, mean=CLIP[0], std=CLIP[1])
  same_results(path, reference.visual, (SIZE, SIZE), CLIP, 1e-5, **keys)
  same_results(path, reference.visual, OTHER, CLIP, 1e-4, **keys)


@pytest.mark.parametrize(
  'changes, array',
  [
    (dict(attentional_pool=True, attn_pooler_heads=4), 'attn_pool.query'),
    (dict(scale_heads=True), 'attn.head_scale'),
    (dict(scale_attn=True), 'ln_attn.weight'),
  ],
)
def test_other_towers_of_open_clip_are_refused(tmp_path, changes, array):
  path = open_clip_file(tmp_path, open_clip_model(**changes))
  with pytest.raises(UserError, match=array):
    load_pretrained(path, num_heads=HEADS)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['small_plus', *further('small')])
def test_teachers_of_dinov3(tmp_path, caplog, name):
  """Masked biases of keys are not used; a teacher is next to its head."""
  width = WIDTH
  reference = references.timm_vit(
    f'vit_{name}_patch16_dinov3_qkvb',
    num_classes=0,
    global_pool='token',
    dynamic_img_size=True,
  )
  teacher = {
    'backbone.mask_token': torch.ones(1, width),
    'backbone.rope_embed.periods': torch.ones(2),
    'backbone.local_cls_norm.weight': torch.ones(width),
    'dino_head.mlp.0.weight': torch.ones(3, 3),
  }
  for key, array in reference.state_dict().items():
    for timms, authors in (
      ('reg_token', 'storage_tokens'),
      ('gamma_1', 'ls1.gamma'),
      ('gamma_2', 'ls2.gamma'),
      ('mlp.fc1_g', 'mlp.w1'),
      ('mlp.fc1_x', 'mlp.w2'),
    ):
      key = key.replace(timms, authors)
    if 'plus' in name:
      key = key.replace('mlp.fc2', 'mlp.w3')
    teacher[f'backbone.{key}'] = array
  for key in [key for key in teacher if key.endswith('attn.q_bias')]:
    query = teacher.pop(key)
    value = teacher.pop(key.replace('q_bias', 'v_bias'))
    bias = key.replace('q_bias', 'qkv.bias')
    teacher[bias] = torch.cat([query, torch.ones(width), value])
    mask = torch.ones(3, width)
    mask[1] = 0
    teacher[f'{bias}_mask'] = mask.reshape(-1)
  path = str(tmp_path / 'dinov3_vits16_pretrain_lvd1689m-08c60483.pth')
  torch.save({'teacher': teacher}, path)
  for size, limit in (((16, 16), 1e-5), ((12, 20), 1e-4)):
    references.same_results(path, reference, size, IMAGENET, limit)
  assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, channels', [('vit', 5), *further(['vit', 1], ['swin', 1], ['swin', 5])]
)
def test_images_with_other_channels(tmp_path, name, channels):
  """One mean for all channels, or [-1, 1]."""
  size, sizes = SIZE, dict(in_chans=channels)
  architecture = 'vit_base_patch16_224'
  if name == 'swin':
    size, architecture = 64, 'swin_tiny_patch4_window7_224'
    sizes |= dict(img_size=64, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
    sizes |= dict(window_size=4, patch_size=4, depth=None)
  reference = timm_vit(architecture, **sizes)
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
  """The log says so."""
  reference = timm_vit(in_chans=1)
  config = dict(
    architecture='vit_base_patch16_224',
    pretrained_cfg=dict(mean=IMAGENET[0], std=IMAGENET[1]),
  )
  path = references.timm_file(tmp_path, reference, config)
  loaded = load_pretrained(path, num_heads=HEADS)
  assert loaded.model.normalization == ((0.5,), (0.5,))
  assert 'mean and std of its channels are unknown' in caplog.text
