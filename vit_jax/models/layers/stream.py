"""The residual stream: the activations between the branches of a model."""

import jax
from jaxtyping import Array, Float

from vit_jax.arrays import sharding


def stored(x: Float[Array, '...']) -> Float[Array, '...']:
  """Returns the residual stream before a branch.

  The gradient of the stream is a sum over all later branches. On a CPU, it is
  stored before each branch. XLA's CPU compiler would otherwise compute the sum
  again for each branch of unrolled layers, in a time that grows with the square
  of their number. (This requires an option, see `training.compiling`.)
  """
  if sharding.on_tpu() or sharding.on_gpu():
    return x
  return _stored_gradient(x)


@jax.custom_vjp
def _stored_gradient(x: Float[Array, '...']) -> Float[Array, '...']:
  return x


def _forward(x: Array) -> tuple[Array, None]:
  return x, None


def _backward(_: None, dx: Array) -> tuple[Array]:
  return (jax.lax.optimization_barrier(dx),)


_stored_gradient.defvjp(_forward, _backward)
