"""Dropout and drop path as functions of explicit keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt32

from vit_jax.arrays import sharding

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def dropout(
  x: Float[Array, '...'], rate: float, key: Key[Array, ''] | None
) -> Float[Array, '...']:
  """Sets a fraction `rate` of the entries to 0 and scales up the others.

  Args:
    x: activations.
    rate: fraction of entries to drop, in [0, 1).
    key: random key; None for evaluation, when nothing is dropped.
  """
  if key is None or rate == 0:
    return x
  # 32-bit integers are compared, without a conversion to floats.
  threshold = min(round(rate * 2**32), 2**32 - 1)
  shape = x.shape
  if sharding.on_gpu():
    # With several leading axes, XLA on GPUs transposes the residual stream, and
    # a step of B/16 takes 9 % longer. They are therefore merged into one, which
    # does not change the random words.
    x = x.reshape(-1, shape[-1])
  keep = random_words(key, x.shape) >= jnp.uint32(threshold)
  return jnp.where(keep, scaled(x, 1 / (1 - rate)), 0).reshape(shape)


def random_words(
  key: Key[Array, ''], shape: tuple[int, ...]
) -> UInt32[Array, '...']:
  """Returns 32 random bits per entry: a hash of its indices and the key.

  They are suitable for dropout, which uses the high bits, but not for other
  purposes: there are only 2^32 different rows of words. Keys must be results of
  `split` or `fold_in`, which hash them. Two keys with the same last word, whose
  first words differ by d (xor), give the same rows in another order: row i for
  one key is row i ^ d for the other.

  XLA fuses this function with its user: no mask is stored, every device
  computes its own part, and the cost is a fraction of that of JAX's generators,
  which would take longer than the layer itself.

  Reference: the multipliers and shifts are those of lowbias32, from C. Wellons'
  search for integer hashes of low bias. The last round for a column leaves out
  an operation that only affects the low bits.

  Args:
    key: random key.
    shape: shape of the result.
  """
  words = jax.random.key_data(key).astype(jnp.uint32)
  rows = jnp.zeros(shape[:-1], jnp.uint32)
  for axis, size in enumerate(shape[:-1]):
    index = jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], axis)
    rows = rows * jnp.uint32(size) + index
  # The key is mixed in twice per row; each column then costs only one round.
  rows = _mix(_mix(rows ^ words[0]) + words[-1])
  columns = jnp.arange(shape[-1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
  x = (rows[..., None] ^ columns) * _FIRST
  return (x ^ (x >> 16)) * _SECOND


def _mix(x: UInt32[Array, '...']) -> UInt32[Array, '...']:
  """Applies a bijection in which every bit depends on every other bit."""
  x = (x ^ (x >> 16)) * _FIRST
  x = (x ^ (x >> 15)) * _SECOND
  return x ^ (x >> 16)


def scaled(x: Array, factor: Any) -> Array:
  """Returns x · factor in the dtype of x.

  The product is rounded, not the factor, because a rounded factor would change
  all entries in the same direction.
  """
  return (x.astype(jnp.float32) * factor).astype(x.dtype)


def drop_path(
  x: Float[Array, 'n t d'],
  rate: Float[Array, ''],
  key: Key[Array, ''] | None,
) -> Float[Array, 'n t d']:
  """Sets a residual branch to 0 for a fraction `rate` of the examples.

  Args:
    x: result of the branch.
    rate: fraction of examples, in [0, 1).
    key: random key; None for evaluation, when nothing is dropped.

  Reference: stochastic depth, Huang et al., arXiv 1603.09382.
  """
  if key is None:
    return x
  # One number per example: all its tokens are kept or dropped together.
  keep = 1 - rate
  kept = jax.random.uniform(key, (x.shape[0], 1, 1)) < keep
  return jnp.where(kept, scaled(x, 1 / keep), 0)
