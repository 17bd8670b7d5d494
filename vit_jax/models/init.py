"""Initializers of parameters: one table, `INIT`, for the official codes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

Initializer = Callable[..., Array]

# timm, DeiT and Swin truncate at ±2, which is 100 standard deviations, so the
# distribution is in effect normal.
NORMAL = nn.initializers.normal(0.02)
ZEROS = nn.initializers.zeros_init()
_LECUN = nn.initializers.lecun_normal()
_XAVIER = nn.initializers.xavier_uniform()
# Xavier's distribution for one matrix [d, 3 d]: 2 / (d + 3 d) is half of
# 2 / (d + d).
_JOINT_XAVIER = nn.initializers.variance_scaling(0.5, 'fan_avg', 'uniform')


def torch_bias(inputs: int) -> Initializer:
  """Returns PyTorch's default initializer of biases: ±1 / √inputs, uniform.

  Args:
    inputs: number of inputs of each output (fan-in).
  """
  bound = inputs**-0.5

  def uniform(key: Array, shape: Any, dtype: Any = jnp.float32) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return uniform


class Init(NamedTuple):
  """Initializers of a Vision Transformer.

  Attributes:
    matrix: matrices of the layers.
    query_key_value: matrices of queries, keys and values.
    mlp_bias: biases of an MLP.
    cls: class token.
    embedding: matrix of the patch embedding.
    embedding_bias: function of the number of inputs that returns the
      initializer of the patch embedding's bias.
    pre_logits: matrix of the layer before the head.
    head: matrices of the heads.
  """

  matrix: Initializer = _XAVIER
  query_key_value: Initializer = _XAVIER
  mlp_bias: Initializer = nn.initializers.normal(1e-6)
  cls: Initializer = ZEROS
  embedding: Initializer = _LECUN
  embedding_bias: Callable[[int], Initializer] = lambda inputs: ZEROS
  pre_logits: Initializer = _LECUN
  head: Initializer = ZEROS


# Values of `model.start_values`; `vit.Config` describes them.
INIT = {
  'authors': Init(),
  'mae': Init(query_key_value=_JOINT_XAVIER, cls=NORMAL, embedding=_XAVIER),
  'trunc_normal': Init(
    matrix=NORMAL,
    query_key_value=NORMAL,
    mlp_bias=ZEROS,
    cls=NORMAL,
    # PyTorch's default initializers of a convolution
    embedding=nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform'),
    embedding_bias=torch_bias,
    pre_logits=NORMAL,
    head=NORMAL,
  ),
}
