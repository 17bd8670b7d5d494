"""Tests that the type checks of the test suite are active."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
import typeguard

from tests.typecheck import typechecked
from vit_jax.models.layers import Mlp
from vit_jax.objectives import losses


def test_there_are_eight_devices():
  assert len(jax.devices()) == 8


def test_functions_check_shapes():
  """Labels and logits of different lengths are refused."""
  with pytest.raises(jaxtyping.TypeCheckError, match='labels'):
    losses.softmax_cross_entropy(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32))


def test_flax_modules_check_shapes():
  """A layer called without the batch dimension is refused."""
  layer = Mlp(8, 0.0, 'tanh', jnp.dtype('float32'))
  with pytest.raises(jaxtyping.TypeCheckError, match='x'):
    layer.init(jax.random.key(0), jnp.zeros((3, 4)), None)


@typechecked
def checked(a: int, *more: float, b: list[int] | None = None, **named: str):
  return a == 0


def test_values_of_other_types_are_refused():
  assert checked(0, 1.0, b=[0], c='a')
  for args, kwargs in (
    (('0',), {}),
    ((0, 1.0, 'a'), {}),
    ((0,), {'b': ['a']}),
    ((0,), {'c': 1}),
  ):
    with pytest.raises(typeguard.TypeCheckError):
      checked(*args, **kwargs)
