"""Tests that unusable weights are refused where they are loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_vit

from tests.faults.counts import injected
from vit_jax import checkpoint, convert, load_pretrained
from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights import contract, pretrained
from vit_jax.weights.formats import npz

LEAF = 'encoder/layers/mlp/fc1/kernel'


@pytest.fixture(params=['npz', 'directory'])
def saved(request, tmp_path):
  """Returns a function that writes weights with one value of a leaf changed."""

  def save(value, leaf=LEAF):
    params = tiny_vit.noise_params(Model(5, **tiny_vit.SIZES), (8, 8))
    flat = tree.flatten(params)
    flat[leaf] = flat[leaf].at[..., 0, 1].set(value)
    params = tree.unflatten(flat)
    file = tmp_path / 'small.npz'
    npz.save(str(file), params, {})
    if request.param == 'npz':
      return str(file)
    about = pretrained.find(str(_finite(tmp_path))).about
    mesh = sharding.make_mesh(jax.devices()[:1])
    arrays = jax.tree.map(np.asarray, params)
    places = sharding.with_shardings(jax.eval_shape(lambda: params), mesh, ())
    placed = jax.tree.map(sharding.place, arrays, places)
    checkpoint.export_params(tmp_path / 'exported', placed, about)
    return str(tmp_path / 'exported')

  return save


def _finite(folder):
  """Writes a file with finite weights."""
  params = tiny_vit.noise_params(Model(5, **tiny_vit.SIZES), (8, 8))
  npz.save(str(folder / 'finite.npz'), params, {})
  return folder / 'finite.npz'


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(saved, value):
  """The message has path, leaf and count, from every way to load."""
  injected('weights that are not finite')
  path = saved(value)
  layers, units = tiny_vit.SIZES['depth'], tiny_vit.SIZES['mlp_dim']
  size = layers * tiny_vit.SIZES['width'] * units
  with pytest.raises(UserError, match='NaN or infinite') as error:
    load_pretrained(path)
  assert path in str(error.value)
  assert f'{LEAF} ({layers} of {size})' in str(error.value)
  with pytest.raises(UserError, match=LEAF):
    convert.run(path, path + '.converted')


def test_an_average_that_is_not_finite_is_refused(tmp_path):
  source = pretrained.find(str(_finite(tmp_path)))
  mesh = sharding.make_mesh(jax.devices()[:1])
  abstract = source.abstract_params(mesh)
  params = jax.tree.map(lambda leaf: leaf * jnp.nan, source.load(abstract))
  source = pretrained._checked(
    contract.Pretrained('x', {}, source.load, lambda _: params)
  )
  with pytest.raises(UserError, match='more leaves'):
    source.load_average(abstract)


@pytest.mark.parametrize('name', ['a.npy', 'B_16', 'weights.h5'])
def test_files_of_another_kind_are_refused(tmp_path, name):
  """The message lists the supported kinds."""
  (tmp_path / name).write_bytes(b'weights')
  with pytest.raises(UserError, match=r'\.npz, \.safetensors'):
    load_pretrained(str(tmp_path / name))
