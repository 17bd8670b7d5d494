"""Tests of messages about wrong keys of `config.model`, images and sizes."""

import functools

import jax
import numpy as np
import pytest
from tiny_vit import SIZES, abstract

from examples import axial_resnet, axial_vit
from vit_jax.errors import UserError
from vit_jax.models import positions, resnet, swin, vit

SWIN = dict(width=8, depths=(2, 2), num_heads=2, window_size=4)
RESNET = dict(depths=(3,), width_factor=1)
STEM = dict(name='resnet', depths=(1, 1))
# Keys of a ViT in addition to `SIZES`, and words of the message.
VIT = (
  (dict(width=15), 'num_heads must divide width'),
  (dict(depth=0), 'model.depth is 0; it must be at least 1'),
  (dict(dtype='float16'), 'bfloat16'),
  (dict(dropout=1.0), 'dropout'),
  (dict(distilled=True, pool='gap'), "model.pool='token'"),
  (dict(distilled=True, pre_logits=True), 'pre_logits=False'),
  (dict(distilled=True, fc_norm=True), 'model.fc_norm'),
  (dict(pool='map', fc_norm=True), 'model.fc_norm'),
  (dict(norm_eps=0.0), 'norm_eps'),
  (dict(layer_scale=float('nan')), 'layer_scale'),
  (dict(position='relative', position_at='stem'), 'allowed: layers, shared'),
  (dict(position='none', position_at='stem'), "position_at is 'stem'"),
  (dict(position='2d', prefix_positions=False), 'prefix_positions'),
  (dict(position='sincos2d', width=30), 'a multiple of 4'),
  (dict(position='rope2d', num_heads=8), 'width of a head'),
  (dict(stem=STEM | dict(depths=(0,))), 'model.stem.depths[0] is 0'),
  (dict(stem=dict(name='resnt', depths=())), "mean 'resnet'"),
  (
    dict(position='none', rope='index', rope_registers=10.0, registers=3),
    'model.registers=4',
  ),
  (dict(channels=5, mean=(0.5,) * 4, std=(0.5,) * 5), 'model.mean'),
  (dict(channels=5, mean=(0.5,) * 5), 'model.std'),
  (dict(std=(0.0, 1.0, 1.0), mean=(0.5,) * 3), 'model.std'),
  (dict(channels=17), 'model.channels'),
  (dict(channels=1, pixels='imagenet'), 'model.pixels'),
)
KEYS = [
  *((vit, SIZES | keys, words) for keys, words in VIT),
  (vit, dict(variant='B/17'), "'B/17'"),
  (vit, dict(variant='X/16'), 'nearest of 48: '),
  (vit, dict(), 'patch_size, width, depth'),
  (vit, dict(variant='R50+B/14'), "did you mean 'R50+B/16'"),
  (vit, dict(variant='R+Ti/16', pixels='imagenet'), 'model.pixels'),
  (swin, dict(variant='H'), "'H'"),
  (swin, dict(), 'width, depths, num_heads'),
  (swin, SWIN | dict(depths=(2, 3)), 'even number'),
  (swin, SWIN | dict(depths=()), 'even number'),
  (swin, SWIN | dict(width=9), 'num_heads must divide'),
  (swin, SWIN | dict(window_rule='tim'), "window_rule is 'tim'"),
  (resnet, dict(variant='R50x5'), 'R50x4'),
  (resnet, dict(), 'lacks depths, width_factor'),
  (resnet, RESNET | dict(depths=(2, 0)), 'model.depths[1] is 0'),
  (resnet, RESNET | dict(depths=()), 'number of model.depths is 0'),
  (resnet, RESNET | dict(unroll=0), 'model.unroll is 0'),
  (axial_vit, SIZES | dict(width=15, num_heads=3), 'width must be even'),
  (axial_resnet, dict(variant='R26'), 'allowed: R50'),
  (axial_resnet, dict(depths=(1,), num_heads=3), 'num_heads is 3;'),
]


@pytest.mark.parametrize('module, keys, words', KEYS)
def test_wrong_keys(module, keys, words):
  """Messages contain the value, or what is allowed."""
  with pytest.raises(UserError) as error:
    module.Model(10, **keys)
  assert words in str(error.value)


MODELS = {
  'vit': vit.Model(3, **SIZES),
  'positions in layers': vit.Model(3, **SIZES, position_at='layers'),
  'rows and columns': vit.Model(3, **SIZES, position='2d'),
  'relative': vit.Model(3, **SIZES, position='relative'),
  'swin': swin.Model(3, **SWIN),
  'resnet': resnet.Model(3, depths=(1,), width_factor=1),
  'axial_vit': axial_vit.Model(3, **SIZES),
  'axial_resnet': axial_resnet.Model(3, depths=(1, 1)),
}


@functools.cache
def params_of(name):
  return abstract(MODELS[name], (16, 16))


def refused(name, words, shape, dtype='float32', **options):
  """Traces a model with parameters for 16x16 pixels without computing."""
  model = MODELS[name]

  def apply(params, images):
    return model.apply({'params': params}, images, **options)

  with pytest.raises(UserError, match=words):
    jax.eval_shape(apply, params_of(name), jax.ShapeDtypeStruct(shape, dtype))


@pytest.mark.parametrize('name', MODELS)
def test_wrong_images(name):
  """Messages contain the dtype or shape, and what is expected."""
  for dtype in ('uint8', 'int32', 'bool'):
    refused(name, f'{dtype}.*127.5', (2, 16, 16, 3), dtype)
  for shape in ((16, 16, 3), (2, 16, 16, 4), (2, 3, 16, 16), (1, 2, 16, 16, 3)):
    given = str(list(shape)).replace('[', r'\[')
    refused(name, rf'{given}.*\[n, height, width, 3\]', shape)
  if name != 'resnet':  # takes images of any size
    refused(name, r'has the shape \[.*image_size', (2, 32, 32, 3))


@pytest.mark.parametrize(
  'name, method',
  [('vit', 'embed'), ('vit', 'predict'), ('resnet', 'maps')]
  + [('swin', 'stages')],
)
def test_all_methods_check_images(name, method):
  refused(name, 'uint8', (2, 16, 16, 3), 'uint8', method=method)


@pytest.mark.parametrize('name', ['swin', 'resnet'])
@pytest.mark.parametrize('want', ['layers', 'attention'])
def test_results_that_a_model_does_not_have(name, want):
  options = dict(want=(want,), method='predict')
  refused(name, f'no {want}; .*want: tokens', (2, 16, 16, 3), **options)


TABLE = {'x/embedding': np.zeros((1, 25, 6), np.float32)}


@pytest.mark.parametrize(
  'function, arguments, words',
  [
    (vit.Model(0, variant='H/14').grid, [(384, 384)], "384.* of 14 .*'drop'"),
    (vit.Model(0, variant='H/14').grid, [(13, 384)], 'of 14 pixels.$'),
    (vit.Model(0, **SIZES).grid, [(9, 8)], '9x8'),
    (vit.Model(0, **SIZES).grid, [(8, 9)], '8x9'),
    (vit.Model(0, **SIZES, remainder='drop').grid, [(3, 8)], '3x8 .*4 pixels'),
    (vit.Model(0, variant='R+Ti/16').check, [(225, 224)], '225x224 .*of 32'),
    (swin.Model(5, **SWIN).check, [(30, 32)], '30x32 .*multiples of 4'),
    # timm's windows are rectangular if a side of the map is smaller.
    (
      swin.Model(5, **SWIN, window_rule='timm').check,
      [(12, 32)],
      "window_rule='timm'.*3x8 .*3x4 tokens",
    ),
    (MODELS['relative'].at_sizes, [(28, 28)], "'relative'.*28x28"),
    (swin.Model(5, variant='T').at_sizes, [(224, 224)], 'of several sizes'),
    (positions.resize, [TABLE, (4, 7), (2, 2), None], '4x7 grid'),
    (positions.resize, [TABLE, (4, 6), (2, 2), 'nearest'], 'aligned'),
    (positions.square_grid, [195], '195'),
  ],
)
def test_wrong_sizes(function, arguments, words):
  with pytest.raises(UserError, match=words):
    function(*arguments)


def test_sizes_that_are_allowed():
  """Windows of a Swin are square, and maps of a ResNet have any size."""
  swin.Model(5, **SWIN).check((12, 32))
  maps = resnet.Model(5, **RESNET)
  assert maps.at_sizes((28, 28)) is maps
