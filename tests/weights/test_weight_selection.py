"""Tests of the choice of weights: averages and teachers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import load_pretrained
from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Format, Pretrained

SIZES = dict(patch_size=8, width=16, depth=1, mlp_dim=8, num_heads=2)
HEAD = dict(outputs=8, hidden=8, bottleneck=4, dtype='float32')
CROPS = dict(name='multicrop', local_crops=1, local_size=(8,))
ABOUT = dict(
  model=dict(name='vit', dtype='float32', **SIZES),
  objective=dict(name='dino', head=HEAD),
  preprocess=dict(resize='squash'),
  num_classes=0,
  image_size=[16, 16],
  class_names=[],
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


@pytest.fixture(autouse=True)
def checkpoint(monkeypatch):
  """Opens 'kept:PATH': parameters 1, their average 2, the extra state 3."""
  loaders = dict(load_average=_filled(2.0), load_extra=_filled(3.0))

  def kept(**loaders):
    source = Pretrained('PATH', ABOUT, _filled(1.0), **loaders)
    return Format(lambda path: None, lambda path, head: source, print)

  monkeypatch.setitem(pretrained.FORMATS, 'kept', kept(**loaders))
  monkeypatch.setitem(pretrained.FORMATS, 'alone', kept())


def _values(tree):
  return {
    float(value)
    for leaf in jax.tree.leaves(tree)
    for value in np.asarray(leaf).flat
  }


@pytest.mark.parametrize(
  ('name', 'value'), [('params', 1.0), ('ema', 2.0), ('teacher', 3.0)]
)
def test_named_weights_are_loaded(name, value):
  """With the head of the objective, and only the model."""
  source = pretrained.find('kept:PATH', name)
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = source.load(source.abstract_params(mesh))
  assert set(params) == {'model', 'head'} and _values(params) == {value}
  assert _values(load_pretrained('kept:PATH', weights=name)[1]) == {value}


@pytest.mark.parametrize(
  ('place', 'name', 'known'),
  [
    ('kept', 'techer', 'ema, params, teacher'),
    ('alone', 'ema', 'params'),
    ('alone', 'teacher', 'params'),
  ],
)
def test_unknown_names_of_weights_are_refused(place, name, known):
  """The message lists the existing names before anything is loaded."""
  with pytest.raises(UserError, match=f"'{name}'; .*allowed: {known}"):
    pretrained.find(f'{place}:PATH', name)
