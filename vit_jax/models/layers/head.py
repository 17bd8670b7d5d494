"""The last layer of a classifier, the same in all models."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.models.layers.linear import Initializer, Linear


def head(
  num_classes: int,
  dtype: jnp.dtype,
  *,
  bias: float = 0.0,
  kernel_init: Initializer = nn.initializers.zeros,
) -> Linear:
  """Logits from features: products in `dtype`, the sum in float32.

  Near a bias of -10 bfloat16 has steps of 1/16.

  Args:
    num_classes: outputs; split over the mesh's axis `model`.
    dtype: of computation.
    bias: start value.
    kernel_init: start values of the matrix.
  """
  return Linear(
    (num_classes,),
    model_dim=-1,
    kernel_init=kernel_init,
    bias_init=nn.initializers.constant(bias),
    dtype=dtype,
    out_dtype=jnp.dtype(jnp.float32),
  )
