"""Tests of `load_pretrained`, of `convert` and of the choice of weights."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
import tiny_vit

from tests.faults.counts import further, injected
from vit_jax import convert, load_pretrained, save_pretrained
from vit_jax.arrays import sharding, tree
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description

LEAF = 'encoder/layers/mlp/fc1/kernel'


def classifier(folder):
  """Returns parameters and their description."""
  path = str(folder / 'first.npz')
  params = tiny_vit.save_classifier(path)
  return params, pretrained.find(path).description


@pytest.mark.slow
@pytest.mark.parametrize('value', [np.nan, *further(np.inf, -np.inf)])
@pytest.mark.parametrize('name', ['small.npz', *further('directory')])
def test_weights_that_are_not_finite_are_refused(tmp_path, name, value):
  """The message has path, leaf and count, from every way to load."""
  injected('weights that are not finite')
  params, description = classifier(tmp_path)
  flat = tree.flatten(params)
  flat[LEAF] = flat[LEAF].at[..., 0, 1].set(value)
  path = str(tmp_path / name)
  pretrained.save(path, tree.unflatten(flat), description)
  with pytest.raises(UserError, match='NaN or infinite') as error:
    load_pretrained(path)
  assert path in str(error.value)
  assert f'{LEAF} (1 of {flat[LEAF].size})' in str(error.value)
  with pytest.raises(UserError, match=LEAF):
    convert.run(path, path + '.converted')


@pytest.mark.parametrize('name', ['small.npz', 'directory'])
def test_a_program_that_computes_in_64_bits_loads_weights(tmp_path, name):
  """Parameters are float32, also those of a new head, and so are outputs."""
  path = str(tmp_path / name)
  pretrained.save(path, *classifier(tmp_path))
  images = tiny_vit.images_of(1, 48, 48)
  outputs = []
  for enabled in (False, True):
    with jax.enable_x64(enabled):
      source = pretrained.find(path)
      source.load(source.abstract_params())
      model, params = load_pretrained(path, image_size=48, num_classes=5)
      outputs.append(model.apply({'params': params}, images))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'float32'}
    assert outputs[-1].dtype == 'float32'
  np.testing.assert_allclose(*outputs, atol=1e-6)


@pytest.mark.parametrize('name', ['a.npz', 'a.safetensors', 'workdir'])
def test_loading_builds_few_models(tmp_path, monkeypatch, name):
  """At most two: that of the file, and one with changes by the caller."""
  path = str(tmp_path / name)
  step = '/checkpoints/1' if name == 'workdir' else ''
  pretrained.save(path + step, *classifier(tmp_path))
  construct = mock.Mock(wraps=schema.construct)
  monkeypatch.setattr(schema, 'construct', construct)
  for limit, keys in (
    (1, dict(image_size=48)),
    (2, dict(dtype='bfloat16', image_size=48)),
  ):
    construct.reset_mock()
    load_pretrained(path, **keys)
    built = [call.args[0] for call in construct.call_args_list]
    assert 1 <= built.count(vit.Model) <= limit


SIZES = dict(patch_size=8, width=16, depth=1, mlp_dim=8, num_heads=2)
HEAD = dict(outputs=8, hidden=8, bottleneck=4, dtype='float32')
CROPS = dict(name='multicrop', local_crops=1, local_size=(8,))
DINO = Description(
  model=dict(name='vit', dtype='float32', **SIZES),
  objective=dict(name='dino', head=HEAD),
  preprocess=dict(resize='squash'),
  num_classes=0,
  image_size=(16, 16),
  config=dict(augment=CROPS),
)


def _filled(value):
  """Returns a loader that fills all arrays with a number."""

  def leaf(abstract):
    return sharding.place(np.full(abstract.shape, value), abstract)

  return lambda abstract: jax.tree.map(leaf, abstract)


# Parameters are 1, their average 2, and the extra state is 3.
ALONE = Pretrained('PATH', DINO, _filled(1.0))
KEPT = dataclasses.replace(
  ALONE, load_average=_filled(2.0), load_extra=_filled(3.0)
)


@pytest.mark.parametrize(
  ('name', 'value'), [('params', 1.0), ('ema', 2.0), ('teacher', 3.0)]
)
def test_named_weights_are_loaded(name, value):
  """With the head of the objective."""
  source = KEPT.chosen(name)
  params = source.load(source.abstract_params())
  assert set(params) == {'model', 'head'}
  for leaf in jax.tree.leaves(params):
    np.testing.assert_array_equal(leaf, value)


@pytest.mark.parametrize(
  ('source', 'name', 'known'),
  [
    (KEPT, 'techer', 'ema, params, teacher'),
    (ALONE, 'ema', 'params'),
    (ALONE, 'teacher', 'params'),
  ],
)
def test_unknown_names_of_weights_are_refused(source, name, known):
  """The message lists the existing names before anything is loaded."""
  with pytest.raises(UserError, match=f"'{name}'; .*allowed: {known}"):
    source.chosen(name)


NAMES = ['ant', 'bee', 'cat', 'dog', 'eel']


@pytest.fixture
def named(tmp_path):
  """Returns the path of weights with class names."""
  params = tiny_vit.noise_params(vit.Model(5, **tiny_vit.SIZES), (8, 8))
  path = str(tmp_path / 'source.npz')
  description = Description(
    model=dict(name='vit', **tiny_vit.SIZES),
    num_classes=5,
    image_size=(8, 8),
    class_names=tuple(NAMES),
    preprocess=dict(resize='central'),
  )
  save_pretrained(path, params, description)
  return path


@pytest.mark.slow
def test_an_existing_file_is_not_overwritten(tmp_path, named):
  """--overwrite replaces it."""
  target = tmp_path / 'a.npz'
  target.write_bytes(b'of another model')
  for path in (target, f'big_vision:{target}'):
    with pytest.raises(UserError, match=r'a\.npz .*--overwrite'):
      convert.run(named, str(path))
  assert target.read_bytes() == b'of another model'
  convert.run(named, str(target), overwrite=True)
  assert pretrained.find(str(target)).description.class_names == tuple(NAMES)


def test_notes_of_other_weights_are_not_used(tmp_path, named, caplog):
  """Notes next to an .npz are compared with its arrays."""
  with np.load(named) as arrays:
    changed = {name: array + 1 for name, array in arrays.items()}
  np.savez(named, **changed)
  names = pretrained.find(named).description.class_names
  assert names == tuple(f'class {i}' for i in range(5))
  assert 'source.npz.json' in caplog.text


@pytest.mark.slow
def test_load_pretrained_returns_names_and_preprocessing(named):
  """The result still unpacks to a model and parameters."""
  loaded = load_pretrained(named)
  model, params = loaded
  assert loaded.model is model and loaded.params is params
  assert loaded.class_names == NAMES and loaded.image_size == (8, 8)
  pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
  image = loaded.preprocess(pixels)
  assert image.shape == (8, 8, 3) and image.dtype == np.float32
  assert -1 <= image.min() < image.max() <= 1
  expected = pretrained.find(named).description.transform().pixels(pixels)
  np.testing.assert_array_equal(np.round((image + 1) * 127.5), expected)
  assert model.apply({'params': params}, image[None]).shape == (1, 5)
  other = load_pretrained(named, num_classes=2, image_size=12)
  assert len(other.class_names) == 2
  assert other.preprocess(pixels).shape == (12, 12, 3)
