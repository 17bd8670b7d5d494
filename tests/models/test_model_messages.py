"""Tests of the messages about wrong keys of `config.model`."""

import pytest
from tiny_vit import SIZES

from examples import axial_resnet, axial_vit
from vit_jax.errors import UserError
from vit_jax.models import resnet, swin, vit

SWIN = dict(width=8, depths=(2, 2), num_heads=2, window_size=2)
RESNET = dict(depths=(3,), width_factor=1)
STEM = dict(name='resnet', depths=(1, 1))
NAN = float('nan')
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
  (dict(layer_scale=NAN), 'layer_scale'),
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
CASES = [
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


@pytest.mark.parametrize('module, keys, words', CASES)
def test_messages_contain_the_value_or_what_is_allowed(module, keys, words):
  with pytest.raises(UserError) as error:
    module.Model(10, **keys)
  assert words in str(error.value)
