"""The classification head of all models."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.models.layers.initializers import Initializer
from vit_jax.models.layers.linear import Linear


def head(
  num_classes: int,
  dtype: jnp.dtype,
  *,
  bias: float = 0.0,
  kernel_init: Initializer = nn.initializers.zeros,
) -> Linear:
  """Returns the layer that computes logits from features.

  Operands of the product have `dtype`; the sum with the bias is float32,
  because adjacent bfloat16 numbers near a bias of -10 differ by 1/16.

  Args:
    num_classes: number of outputs, split over the mesh axis `model`.
    dtype: dtype of the operands.
    bias: initial value of the bias.
    kernel_init: initializer of the matrix.
  """
  return Linear(
    (num_classes,),
    model_dim=-1,
    kernel_init=kernel_init,
    bias_init=nn.initializers.constant(bias),
    dtype=dtype,
    out_dtype=jnp.dtype(jnp.float32),
  )
