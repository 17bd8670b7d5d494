"""Tests of the files of torchvision, open_clip and of authors' repositories."""

import collections
import functools
import logging
import re

import numpy as np
import pytest
import references
import safetensors.numpy
from references import (
  DEPTH,
  HEADS,
  PATCH,
  SIZE,
  WIDTH,
  same_results,
  timm_file,
  timm_vit,
  torch,
)

from tests.faults.counts import further, slow
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.weights.patch_embedding import CLIP

OWN, OTHER = (SIZE, SIZE), (12, 20)  # (height, width)

# Each function returns the content of a file, and the library's function of
# pixels for images of the weights' own size and of another size.


def torchvision_vit():
  """Uses the library's interpolation for the other size."""

  models = pytest.importorskip('torchvision').models

  def model(size):
    torch.manual_seed(0)
    return references.noisy(
      models.VisionTransformer(
        image_size=size,
        patch_size=PATCH,
        num_layers=DEPTH,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        mlp_dim=2 * WIDTH,
        num_classes=7,
      )
    )

  own, larger = model(SIZE), model(24)
  resize = models.vision_transformer.interpolate_embeddings
  state = collections.OrderedDict(own.state_dict())
  larger.load_state_dict(resize(24, PATCH, state))
  return own.state_dict(), {OWN: own, (24, 24): larger}


def torchvision_swin():
  models = pytest.importorskip('torchvision').models
  torch.manual_seed(0)
  model = references.noisy(
    models.SwinTransformer(
      patch_size=[4, 4],
      embed_dim=16,
      depths=[2, 2],
      num_heads=[2, 4],
      window_size=[4, 4],
      num_classes=7,
    )
  )
  return {'model': model.state_dict()}, {(64, 64): model, (64, 96): model}


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


def open_clip_tower(**changes):
  """Uses the library's interpolation for the other size."""
  own = open_clip_model(**changes)
  larger = open_clip_model(**changes, image_size=OTHER)
  from open_clip.model import resize_pos_embed

  state = dict(own.state_dict())
  resize_pos_embed(state, larger)
  larger.load_state_dict(state)
  return own.state_dict(), {OWN: own.visual, OTHER: larger.visual}


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


def renamed_tower():
  """Replaces timm's names, also where the library is not installed."""
  model = timm_vit('vit_base_patch16_clip_224')
  torch.nn.init.zeros_(model.head.bias)
  state = {'token_embedding.weight': torch.ones(9, 8)}
  for name, leaf in model.state_dict().items():
    for timms, theirs in OPEN_CLIP.items():
      name = name.replace(timms, theirs)
    name = f'visual.{name}'.replace('visual.norm.', 'visual.ln_post.')
    state[name] = leaf[0] if name.endswith('_embedding') else leaf
  state['visual.class_embedding'] = model.cls_token[0, 0]
  state['visual.proj'] = state.pop('visual.head.weight').T
  del state['visual.head.bias']
  return state, {OWN: model}


def timm_tower(name, pool, projection='linear', bias=False):
  """Puts an image tower of timm into open_clip; its projection is the head."""
  sizes = dict(embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS)
  model = open_clip_model(
    sizes | dict(patch_size=PATCH, dynamic_img_size=True),
    custom=True,
    timm_model_name=name,
    timm_pool=pool,
    timm_proj=projection,
    timm_proj_bias=bias,
  )
  return model.state_dict(), {OWN: model.visual, OTHER: model.visual}


def deit3():
  """Replaces the names of LayerScale."""
  model = timm_vit('deit3_base_patch16_224')
  state = {
    re.sub(r'ls(\d)\.gamma', r'gamma_\1', name): leaf
    for name, leaf in model.state_dict().items()
  }
  return {'model': state}, {OWN: model}


def dinov2():
  """Gives the class token a position, which timm adds to the token."""
  model = timm_vit('vit_small_patch14_reg4_dinov2')
  state = model.state_dict()
  state['register_tokens'] = state.pop('reg_token')
  place = torch.full_like(state['cls_token'], 0.5)
  state['cls_token'] = state['cls_token'] - place
  state['pos_embed'] = torch.cat([place, state['pos_embed']], dim=1)
  return state | {'mask_token': place[0]}, {OWN: model}


def dinov3(size):
  """Puts a teacher next to its head; masked biases of keys are not used."""
  model = timm_vit(
    f'vit_{size}_patch16_dinov3_qkvb',
    num_classes=0,
    global_pool='token',
    dynamic_img_size=True,
  )
  teacher = {
    'backbone.mask_token': torch.ones(1, WIDTH),
    'backbone.rope_embed.periods': torch.ones(2),
    'backbone.local_cls_norm.weight': torch.ones(WIDTH),
    'dino_head.mlp.0.weight': torch.ones(3, 3),
  }
  for key, array in model.state_dict().items():
    for timms, authors in (
      ('reg_token', 'storage_tokens'),
      ('gamma_1', 'ls1.gamma'),
      ('gamma_2', 'ls2.gamma'),
      ('mlp.fc1_g', 'mlp.w1'),
      ('mlp.fc1_x', 'mlp.w2'),
      ('mlp.fc2', 'mlp.w3' if 'plus' in size else 'mlp.fc2'),
    ):
      key = key.replace(timms, authors)
    teacher[f'backbone.{key}'] = array
  for key in [key for key in teacher if key.endswith('attn.q_bias')]:
    query = teacher.pop(key)
    value = teacher.pop(key.replace('q_bias', 'v_bias'))
    bias = key.replace('q_bias', 'qkv.bias')
    teacher[bias] = torch.cat([query, torch.ones(WIDTH), value])
    mask = torch.ones(3, WIDTH)
    mask[1] = 0
    teacher[f'{bias}_mask'] = mask.reshape(-1)
  return {'teacher': teacher}, {OWN: model, OTHER: model}


def tower(keys=None, **changes):
  """Returns a case of an image tower of open_clip."""
  build = functools.partial(open_clip_tower, **changes)
  return ['open_clip_pytorch_model.bin', build, CLIP, keys or {}]


def tower_of_timm(*arguments):
  """Returns a case of an image tower of timm in open_clip."""
  build = functools.partial(timm_tower, *arguments)
  return ['open_clip_pytorch_model.bin', build, CLIP, {}]


GAP = dict(pool='gap', class_token=True)
DINOV3 = 'dinov3_vits16_pretrain_lvd1689m-08c60483.pth'


@pytest.mark.parametrize(
  'name, build, statistics, keys',
  [
    tower(),
    tower(custom=True),  # another place of the text tower
    tower(quick_gelu=True, keys=dict(gelu='quick')),
    tower(pool_type='avg', keys=GAP),
    tower(final_ln_after_pool=True),
    tower(ls_init_value=0.1),
    tower(patch_dropout=0.5),
    tower(no_ln_pre=True, pool_type='avg', keys=GAP | dict(norm_eps=1e-5)),
    tower_of_timm('vit_base_patch16_siglip_224', 'map', 'none'),
    tower_of_timm('vit_base_patch16_224', 'token'),
    tower_of_timm('vit_base_patch16_224', '', 'linear', True),
    tower_of_timm('vit_medium_patch16_gap_256', 'avg'),
    *slow(
      ['open_clip_pytorch_model.bin', renamed_tower, CLIP, {}],
      ['vit_b_16-c867db91.pth', torchvision_vit, IMAGENET, {}],
      ['swin_t-704ceda3.pth', torchvision_swin, IMAGENET, dict(num_heads=2)],
      ['a.pth', deit3, IMAGENET, {}],
      ['a.pth', dinov2, IMAGENET, {}],
      [DINOV3, functools.partial(dinov3, 'small_plus'), IMAGENET, {}],
    ),
    *further([DINOV3, functools.partial(dinov3, 'small'), IMAGENET, {}]),
  ],
)
def test_results_equal_the_project(tmp_path, name, build, statistics, keys):
  """At the weights' own size to 1e-5, and at another one to 1e-4."""
  content, functions = build()
  path = str(tmp_path / name)
  torch.save(content, path)
  keys = dict(num_heads=HEADS) | keys
  for (size, reference), limit in zip(
    functions.items(), (1e-5, 1e-4), strict=False
  ):
    same_results(path, reference, size, statistics, limit, **keys)


def test_a_teacher_of_dinov3_opens_without_a_warning(tmp_path, caplog):
  torch.save(dinov3('small_plus')[0], tmp_path / DINOV3)
  load_pretrained(str(tmp_path / DINOV3))
  assert not caplog.records


@pytest.mark.parametrize(
  'changes, array',
  [
    (dict(attentional_pool=True, attn_pooler_heads=4), 'attn_pool.query'),
    (dict(scale_heads=True), 'attn.head_scale'),
    (dict(scale_attn=True), 'ln_attn.weight'),
  ],
)
def test_other_towers_of_open_clip_are_refused(tmp_path, changes, array):
  path = str(tmp_path / 'open_clip_pytorch_model.bin')
  torch.save(open_clip_model(**changes).state_dict(), path)
  with pytest.raises(UserError, match=array):
    load_pretrained(path, num_heads=HEADS)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, channels', [('vit', 5), *further(['vit', 1], ['swin', 1], ['swin', 5])]
)
def test_images_with_other_channels(tmp_path, name, channels):
  """One mean for all channels."""
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
  path = timm_file(tmp_path, reference, config)
  statistics = (0.4,) * channels, (0.3,) * channels
  same_results(path, reference, (size, size), statistics, 1e-5)
  loaded = load_pretrained(path)
  pixels = np.zeros((size, size, channels), np.uint8)
  assert loaded.preprocess(pixels).shape == (*loaded.image_size, channels)


def test_statistics_of_rgb_do_not_apply_to_other_channels(tmp_path, caplog):
  """Pixels are then in [-1, 1]; the log says so."""
  config = dict(
    architecture='vit_base_patch16_224',
    pretrained_cfg=dict(mean=IMAGENET[0], std=IMAGENET[1]),
  )
  path = timm_file(tmp_path, timm_vit(in_chans=1), config)
  loaded = load_pretrained(path, num_heads=HEADS)
  assert loaded.model.normalization == ((0.5,), (0.5,))
  assert 'mean and std of its channels are unknown' in caplog.text


# Interpolation of positions


def with_offset(rows, columns):
  scale = [(side + 0.1) / (SIZE // PATCH) for side in (rows, columns)]
  return dict(scale_factor=tuple(scale))


def plain(rows, columns):
  return dict(size=(rows, columns))


def antialiased(rows, columns):
  return dict(size=(rows, columns), antialias=True)


# Files of the repositories, and the arguments of `interpolate` in each of them
REPOSITORIES = {
  'dinov2_vits14_pretrain.safetensors': with_offset,
  'dinov2_vits14_reg4_pretrain.safetensors': antialiased,
  'dino_deitsmall16_pretrain.safetensors': with_offset,
  'mae_pretrain_vit_base.safetensors': plain,
  'deit_3_finetuned.safetensors': plain,
}


@pytest.mark.slow
@pytest.mark.parametrize('size', [(28, 16), *further((12, 12))])
@pytest.mark.parametrize(
  'name', [*REPOSITORIES][:2] + further(*[*REPOSITORIES][2:])
)
def test_positions_of_repositories_are_resized_as_there(tmp_path, name, size):
  arrays = references.state(timm_vit())
  if 'reg4' in name:
    arrays['register_tokens'] = np.zeros((1, 2, WIDTH), np.float32)
  safetensors.numpy.save_file(arrays, tmp_path / name)
  loaded = load_pretrained(
    str(tmp_path / name), image_size=size, num_heads=HEADS
  )
  rows, columns = (side // PATCH for side in size)
  maps = arrays['pos_embed'][0, 1:].reshape(1, SIZE // PATCH, SIZE // PATCH, -1)
  expected = torch.nn.functional.interpolate(
    torch.from_numpy(maps).permute(0, 3, 1, 2),
    mode='bicubic',
    **REPOSITORIES[name](rows, columns),
  )
  actual = loaded.params['position']['embedding'][0, -rows * columns :]
  np.testing.assert_allclose(
    actual.reshape(rows, columns, -1),
    expected[0].permute(1, 2, 0).numpy(),
    atol=1e-5,
  )


@pytest.mark.slow
def test_a_given_method_wins(tmp_path, caplog):
  path = timm_file(tmp_path, timm_vit())
  keys = dict(image_size=12, num_heads=HEADS)
  with caplog.at_level(logging.INFO, 'vit_jax'):
    given = load_pretrained(path, position_resize='aligned', **keys)
  assert 'interpolated (position_resize: aligned)' in caplog.text
  default = load_pretrained(path, **keys)
  tables = [x.params['position']['embedding'] for x in (given, default)]
  assert abs(tables[0] - tables[1]).max() > 1e-3
  with pytest.raises(UserError, match='position_resize.*nearest'):
    load_pretrained(path, position_resize='nearest', **keys)


@pytest.mark.parametrize(
  'grid, keys',
  [
    ((2, 8), dict(class_token=False, global_pool='avg')),  # as many as 4x4
    *further([(2, 8), {}], [(6, 8), {}]),  # 7x7 with the class token
  ],
)
def test_a_rectangle_is_not_taken_for_a_square(tmp_path, grid, keys):
  """The remedy of the message gives timm's logits."""
  size = grid[0] * PATCH, grid[1] * PATCH
  reference = timm_vit(img_size=size, **keys)
  path = timm_file(tmp_path, reference)
  with pytest.raises(UserError, match=re.escape(f'{size} pixels')) as error:
    load_pretrained(path, image_size=size, num_heads=HEADS)
  remedy = str(error.value)
  config = remedy[remedy.index('{') : remedy.rindex('}') + 1]
  (tmp_path / 'config.json').write_text(config)
  same_results(path, reference, size, num_heads=HEADS)


def test_a_square_without_positions_of_other_tokens_is_resized(tmp_path):
  """As in DeiT-III; other sizes than the ambiguous one are accepted."""
  reference = timm_vit(img_size=7 * PATCH, no_embed_class=True)
  path = timm_file(tmp_path, reference)
  loaded = load_pretrained(path, image_size=20, num_heads=HEADS)
  assert loaded.params['position']['embedding'].shape[1] == 25
