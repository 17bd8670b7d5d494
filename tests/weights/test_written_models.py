"""Tests that written weights open as the same model, in every format."""

import json

import jax
import numpy as np
import pytest

from tests.faults.counts import further
from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.weights import foreign, patch_embedding, pretrained
from vit_jax.weights.description import Description

VIT = dict(patch_size=4, width=16, depth=2, mlp_dim=32, num_heads=2)
SWIN = dict(name='swin', width=8, depths=(2, 2), num_heads=2)
SWIN |= dict(window_size=2, image_size=(16, 24))
DINOV3 = dict(position='none', rope='centered', registers=2)
DINOV3 |= dict(layer_scale=1e-4, gated=True, num_classes=0)
# (prefix, name) of each format, by the letter in `MODELS`
FORMATS = {
  'n': ('', 'a.npz'),
  't': ('', 'b.safetensors'),
  'b': ('big_vision:', 'c.npz'),
  'h': ('huggingface:', 'd'),
}
# (letters of the formats that can contain a model besides directories, which
# contain every model; keys of the model)
MODELS = (
  ['ntbh', dict()],
  ['ntb', dict(pool='max')],
  ['ntbh', dict(pool='token_gap')],
  ['tb', dict(pool='map', map_heads=1, map_mlp_dim=24, class_token=True)],
  ['ntbh', dict(gated=True)],
  ['ntb', dict(norm='rms', post_norm=True)],
  ['th', dict(registers=3)],
  ['th', dict(distilled=True)],
  ['ntb', dict(position='sincos2d')],
  ['', dict(position_at='layers')],
  ['ntb', dict(position_at='shared')],
  ['ntbh', dict(prefix_positions=False)],
  ['nb', dict(rope='index', rope_base=50.0, rope_grid=14, rope_offset=1.0)],
  ['nbh', dict(position='rope2d', num_classes=0)],
  ['ntbh', dict(remainder='drop', image_size=(18, 14))],
  ['n', dict(name='resnet', depths=(1, 2), width_factor=1)],
  ['t', SWIN],
  ['t', SWIN | dict(window_size=8, image_size=(16, 16))],  # larger than a map
)
FURTHER = (
  ['ntb', dict(pool='gap')],
  ['ntb', dict(pool='avgmax')],
  ['tb', dict(pool='map')],
  ['tb', dict(pool='map', map_prefix=True, class_token=True)],
  ['ntb', dict(pool='max', class_token=True)],
  ['t', dict(fc_norm=True)],
  ['nb', dict(pre_logits=True)],
  ['ntbh', dict(gelu='exact', norm_eps=1e-5)],
  ['ntbh', dict(gelu='silu')],
  ['ntb', dict(norm='rms')],
  ['t', dict(patch_norm=True)],
  ['t', dict(pre_norm=True)],
  ['ntb', dict(post_norm=True)],
  ['ntb', dict(final_norm=False)],
  ['t', dict(qk_norm=True)],
  ['t', dict(attention_norm=True)],
  ['t', dict(mlp_norm=True)],
  ['ntb', dict(qkv_bias='query_value')],
  ['ntb', dict(qkv_bias='none')],
  ['ntb', dict(bias=False)],
  ['th', dict(layer_scale=1e-4)],
  ['th', dict(registers=1)],
  ['th', dict(registers=3, prefix_positions=False)],
  ['ntb', dict(position='sincos2d_mae')],
  ['ntb', dict(position='none')],
  ['', dict(position='2d')],
  ['', dict(position='relative')],
  ['', dict(position='relative_bias')],
  ['', dict(rope='mixed')],
  ['nb', dict(position='rope2d')],
  ['h', DINOV3],
  ['ntbh', dict(pixels='imagenet')],
  ['n', dict(patch_size=1, stem=dict(name='resnet', depths=(1,)))],
  ['t', SWIN | dict(window_rule='timm', gelu='tanh')],
)


def described(keys):
  """Returns what `save_pretrained` needs to know of a model."""
  model = {'name': 'vit', **(VIT if 'name' not in keys else {}), **keys}
  classes = model.pop('num_classes', 5)
  size = model.pop('image_size', (16, 8))
  return Description(
    model=model | dict(dtype='float32'),
    num_classes=classes,
    image_size=size,
    preprocess=dict(
      resize='central', central_fraction=0.5, interpolation='area'
    ),
    class_names=tuple('abcde')[:classes],
  )


def random_params(description):
  rng, (shapes, _) = np.random.default_rng(0), description.shapes
  return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), shapes)


def function_of(model, params):
  """Returns parameters that are equal if, and only if, the function is.

  Some formats add the positions of prefix tokens to the tokens, and need
  LayerScales, which are ones.
  """
  flat = {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  flat = patch_embedding.converted(flat, model.normalization)
  table = flat.get('position/embedding')
  for name in ('cls', 'distillation', 'registers'):
    if name in flat and getattr(model, 'position_at', '') == 'stem':
      if table is not None and model.prefix_positions:
        own, table = np.split(table, [flat[name].shape[1]], axis=1)
        flat |= {name: flat[name] + own, 'position/embedding': table}
  return {
    name: array
    for name, array in flat.items()
    if '/layers/scale' not in name or np.any(array != 1)
  }


@pytest.fixture
def traced_once(monkeypatch):
  """Remembers the shapes of parameters, whose tracing takes the most time."""
  shapes, known = Description.shapes.func, {}

  def cached(self):
    section = self.model
    others = section.get('stem'), section.get('remainder')
    values = foreign.determined(self)
    key = json.dumps([values, others], default=list)
    if key not in known:
      known[key] = shapes(self)
    return known[key]

  monkeypatch.setattr(Description, 'shapes', property(cached))


# Keys that Hugging Face's types convert without changing the function
CONVERTED = {'layer_scale', 'prefix_positions'}
CONVERTED |= {'position', 'rope', 'gelu'}  # of DINOv3


@pytest.mark.parametrize('formats, keys', [*MODELS, *further(*FURTHER)])
def test_written_weights_open_as_the_same_model(
  tmp_path, traced_once, formats, keys
):
  """Or nothing is written: in this format, the model cannot be contained."""
  description = described(keys)
  params = random_params(description)
  expected = foreign.determined(description)
  for letter, (prefix, name) in FORMATS.items():
    path = f'{tmp_path}/{name}'
    if letter not in formats:
      with pytest.raises(UserError, match='cannot contain a model with'):
        pretrained.save(prefix + path, params, description)
      assert not list(tmp_path.glob(f'{name}*'))
      continue
    pretrained.save(prefix + path, params, description)
    reader, _, head = pretrained.format_of(path)
    opened = reader.load(path, head)
    found = foreign.determined(opened.description)
    differing = {key for key in expected if found[key] != expected[key]}
    assert differing <= (CONVERTED if letter == 'h' else set())
    for key in ('class_names', 'preprocess'):
      assert getattr(opened.description, key) == getattr(description, key)
    again = function_of(opened.model(), opened.load(opened.abstract_params()))
    original = function_of(description.built_model, params)
    assert again.keys() == original.keys()
    for key, array in original.items():
      np.testing.assert_allclose(again[key], array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  'place, keys',
  [('host', {}), ('jit', dict(pool='max')), ('mesh', dict(position='2d'))],
)
def test_directories_contain_every_model(tmp_path, place, keys):
  """Arrays may be anywhere; a description need not be that of other weights."""
  description = described(keys)
  params = random_params(description)
  if place == 'jit':
    params = jax.jit(lambda tree: tree)(params)
  if place == 'mesh':
    mesh = sharding.make_mesh(jax.devices()[:2])
    params = jax.device_put(params, sharding.replicated(mesh))
  path = str(tmp_path / 'weights')
  pretrained.save(path, params, description)
  opened = pretrained.find(path)
  found = foreign.determined(opened.description)
  assert found == foreign.determined(description)
  found = opened.load(opened.abstract_params())
  jax.tree.map(np.testing.assert_array_equal, found, params)
