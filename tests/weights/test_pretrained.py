"""Tests that unusable weights are refused where they are loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_vit

from tests.faults.counts import injected
from vit_jax import convert, load_pretrained
from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.weights import contract, pretrained

LEAF = 'encoder/layers/mlp/fc1/kernel'


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', ['small.npz', 'directory'])
def test_weights_that_are_not_finite_are_refused(tmp_path, name, value):
  """The message has path, leaf and count, from every way to load."""
  injected('weights that are not finite')
  path = str(tmp_path / 'finite.npz')
  params = tiny_vit.save_classifier(path)
  flat = tree.flatten(params)
  flat[LEAF] = flat[LEAF].at[..., 0, 1].set(value)
  about, path = pretrained.find(path).about, str(tmp_path / name)
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = jax.device_put(tree.unflatten(flat), sharding.replicated(mesh))
  pretrained.save(path, params, about)
  with pytest.raises(UserError, match='NaN or infinite') as error:
    load_pretrained(path)
  assert path in str(error.value)
  assert f'{LEAF} (1 of {flat[LEAF].size})' in str(error.value)
  with pytest.raises(UserError, match=LEAF):
    convert.run(path, path + '.converted')


def test_an_average_that_is_not_finite_is_refused(tmp_path):
  tiny_vit.save_classifier(str(tmp_path / 'a.npz'))
  source = pretrained.find(str(tmp_path / 'a.npz'))
  mesh = sharding.make_mesh(jax.devices()[:1])
  abstract = source.abstract_params(mesh)
  params = jax.tree.map(lambda leaf: leaf * jnp.nan, source.load(abstract))
  source = pretrained._checked(
    contract.Pretrained('x', {}, source.load, lambda _: params)
  )
  with pytest.raises(UserError, match='more leaves'):
    source.load_average(abstract)
