"""Tests of the choice of weights, and that unusable ones are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_vit

from tests.faults.counts import further, injected
from vit_jax import convert, load_pretrained
from vit_jax.arrays import sharding, tree
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description

LEAF = 'encoder/layers/mlp/fc1/kernel'


@pytest.mark.slow
@pytest.mark.parametrize('value', [np.nan, *further(np.inf, -np.inf)])
@pytest.mark.parametrize('name', ['small.npz', *further('directory')])
def test_weights_that_are_not_finite_are_refused(tmp_path, name, value):
  """The message has path, leaf and count, from every way to load."""
  injected('weights that are not finite')
  path = str(tmp_path / 'finite.npz')
  params = tiny_vit.save_classifier(path)
  flat = tree.flatten(params)
  flat[LEAF] = flat[LEAF].at[..., 0, 1].set(value)
  description = pretrained.find(path).description
  path = str(tmp_path / name)
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = jax.device_put(tree.unflatten(flat), sharding.replicated(mesh))
  pretrained.save(path, params, description)
  with pytest.raises(UserError, match='NaN or infinite') as error:
    load_pretrained(path)
  assert path in str(error.value)
  assert f'{LEAF} (1 of {flat[LEAF].size})' in str(error.value)
  with pytest.raises(UserError, match=LEAF):
    convert.run(path, path + '.converted')


@pytest.mark.parametrize('name', ['small.npz', 'directory'])
def test_a_program_that_computes_in_64_bits_loads_weights(tmp_path, name):
  """Parameters are float32, also those of a new head, and so are outputs."""
  path = str(tmp_path / 'first.npz')
  params = tiny_vit.save_classifier(path)
  description = pretrained.find(path).description
  path = str(tmp_path / name)
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = jax.device_put(params, sharding.replicated(mesh))
  pretrained.save(path, params, description)
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
  path, first = str(tmp_path / name), str(tmp_path / 'first.npz')
  params = tiny_vit.save_classifier(first)
  description = pretrained.find(first).description
  step = '/checkpoints/1' if name == 'workdir' else ''
  pretrained.save(path + step, params, description)
  construct, built = schema.construct, []

  def counted(constructor, *arguments):
    built.append(constructor)
    return construct(constructor, *arguments)

  monkeypatch.setattr(schema, 'construct', counted)
  for limit, keys in (
    (1, {}),
    (1, dict(image_size=48)),
    (2, dict(num_classes=5)),
    (2, dict(dtype='bfloat16', image_size=48)),
  ):
    built.clear()
    load_pretrained(path, **keys)
    assert 1 <= built.count(vit.Model) <= limit
    assert sum('supervised' in each.__module__ for each in built) <= 2


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
  return lambda abstract: jax.tree.map(
    lambda leaf: jax.device_put(
      jnp.full(leaf.shape, value, leaf.dtype), leaf.sharding
    ),
    abstract,
  )


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
