"""Batch normalization of features, and a linear layer on them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.objectives import contract

PyTree = Any
_RUNNING = 0.1  # weight of a batch in the running statistics
_INITIAL_STD = 0.01  # standard deviation of the initial kernel


class LinearHead(contract.AroundModel):
  """Base class of objectives with a linear layer on normalized features.

  Parameters: `model/…` and `head/{kernel,bias}`. Extra state: the running
  `mean` and `variance` of each feature, or nothing; weights for evaluation
  contain them as `statistics/…`. A subclass defines `init`, `loss` and
  `predict`.

  Attributes:
    epsilon: number that is added to the variance of a feature.
  """

  epsilon: float

  def init_head(self, key: Key[Array, ''], width: int, classes: int) -> PyTree:
    """Returns the initial linear layer."""
    kernel = _INITIAL_STD * jax.random.normal(key, (width, classes))
    return {'kernel': kernel, 'bias': jnp.zeros(classes)}

  def init_statistics(self, width: int) -> dict[str, Array]:
    """Returns the initial running statistics."""
    return {'mean': jnp.zeros(width), 'variance': jnp.ones(width)}

  def standardized(
    self, x: Float[Array, '*n d'], statistics: PyTree = None
  ) -> tuple[Float[Array, '*n d'], PyTree]:
    """Applies batch normalization without scale and shift.

    Args:
      x: features.
      statistics: running statistics; by default, those of the batch are used.

    Returns:
      Normalized features, and the statistics of the batch for `update_extra`.
    """
    if statistics is not None:
      mean, variance, carry = statistics['mean'], statistics['variance'], {}
    else:
      axes, count = tuple(range(x.ndim - 1)), x[..., 0].size
      mean, variance = x.mean(axes), x.var(axes)
      # The running variance is unbiased, as in PyTorch.
      unbiased = variance * (count / max(count - 1, 1))
      carry = {'mean': mean, 'variance': unbiased}
    return (x - mean) / jnp.sqrt(variance + self.epsilon), carry

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Returns the running statistics after a step."""
    return jax.tree.map(
      lambda old, new: old + _RUNNING * (new - old), extra, carry
    )

  def weights(self, params: PyTree, extra: PyTree) -> dict[str, PyTree]:
    """Returns the parameters together with the running statistics."""
    return {'params': params | ({'statistics': extra} if extra else {})}


def linear(head: PyTree, x: Float[Array, '*n d']) -> Float[Array, '*n k']:
  """Applies the linear layer in float32 precision on all devices."""
  return jnp.matmul(x, head['kernel'], precision='highest') + head['bias']
