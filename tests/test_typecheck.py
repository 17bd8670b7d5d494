"""The type checks of the suite are on; without them others check less."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from vit_jax.models import vit
from vit_jax.objectives import losses

SIZES = dict(patch_size=2, width=4, depth=1, mlp_dim=4, num_heads=1)


def test_eight_devices():
  """The suite runs on eight virtual devices."""
  assert len(jax.devices()) == 8


def test_plain_functions_check_shapes():
  """Labels of another length than the logits are refused by annotation."""
  with pytest.raises(jaxtyping.TypeCheckError, match='labels'):
    losses.softmax_cross_entropy(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32))


def test_flax_modules_check_shapes():
  """A model called without the batch dimension is refused by annotation."""
  model = vit.Model(3, **SIZES)
  with pytest.raises(jaxtyping.TypeCheckError, match='images'):
    model.init(jax.random.key(0), jnp.zeros((4, 4, 3)))
