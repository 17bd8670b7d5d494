"""Initializers of matrices and biases, selected by `model.start_values`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

Initializer = Callable[..., Array]

# timm, DeiT and Swin truncate at ±2, which is 100 standard deviations, so the
# distribution is in effect normal.
NORMAL = nn.initializers.normal(0.02)
_XAVIER = nn.initializers.xavier_uniform()
# Xavier's distribution for one matrix [d, 3 d]: 2 / (d + 3 d) is half of
# 2 / (d + d).
_JOINT_XAVIER = nn.initializers.variance_scaling(0.5, 'fan_avg', 'uniform')


def matrix(start_values: str) -> Initializer:
  """Returns the initializer of a layer's matrices.

  Args:
    start_values: 'authors', 'mae' or 'trunc_normal'; see `vit.Config`.
  """
  return NORMAL if start_values == 'trunc_normal' else _XAVIER


def query_key_value(start_values: str) -> Initializer:
  """Returns the initializer of the matrices of queries, keys and values.

  Args:
    start_values: 'authors', 'mae' or 'trunc_normal'; see `vit.Config`.
  """
  return _JOINT_XAVIER if start_values == 'mae' else matrix(start_values)


def mlp_bias(start_values: str) -> Initializer:
  """Returns the initializer of the biases of an MLP.

  Args:
    start_values: 'authors', 'mae' or 'trunc_normal'; see `vit.Config`.
  """
  if start_values == 'trunc_normal':
    return nn.initializers.zeros_init()
  return nn.initializers.normal(1e-6)


def torch_convolution(inputs: int) -> tuple[Initializer, Initializer]:
  """Returns PyTorch's default initializers of a convolution.

  Args:
    inputs: number of inputs of each output (fan-in).

  Returns:
    The initializers of kernel and bias, both uniform within ±1 / √inputs.
  """
  bound = inputs**-0.5

  def uniform(key: Array, shape: Any, dtype: Any = jnp.float32) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return (
    nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform'),
    uniform,
  )
