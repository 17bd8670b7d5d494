"""The type checks of the suite are on; without them others check less."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from vit_jax.models.layers.mlp import Mlp
from vit_jax.objectives import losses


def test_eight_devices():
  """The suite runs on eight virtual devices."""
  assert len(jax.devices()) == 8


def test_plain_functions_check_shapes():
  """Labels of another length than the logits are refused by annotation."""
  with pytest.raises(jaxtyping.TypeCheckError, match='labels'):
    losses.softmax_cross_entropy(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32))


def test_flax_modules_check_shapes():
  """A layer called without the batch dimension is refused by annotation."""
  layer = Mlp(8, 0.0, 'tanh', jnp.dtype('float32'))
  with pytest.raises(jaxtyping.TypeCheckError, match='x'):
    layer.init(jax.random.key(0), jnp.zeros((3, 4)), None)
