"""Dropout and drop path, functions of explicit keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt32

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def dropout(
  x: Float[Array, '...'], rate: float, key: Key[Array, ''] | None
) -> Float[Array, '...']:
  """Zeroes a share `rate` of the entries and scales the others up.

  Args:
    x: activations.
    rate: share to drop, in [0, 1).
    key: None at evaluation, when nothing is dropped.
  """
  if key is None or rate == 0:
    return x
  threshold = min(round(rate * 2**32), 2**32 - 1)
  keep = random_words(key, x.shape) >= jnp.uint32(threshold)
  return jnp.where(keep, scaled(x, 1 / (1 - rate)), 0)


def random_words(
  key: Key[Array, ''], shape: tuple[int, ...]
) -> UInt32[Array, '...']:
  """32 random bits for each entry: a hash of its place and the key.

  Good enough for dropout, which uses the high bits, but not for more: there are
  only 2^32 different rows of words. Keys have to come from `split` or
  `fold_in`, which hash them: two keys with the same last word, whose first
  words differ by d (xor), give the same rows in another order: row i of one is
  row i ^ d of the other.

  XLA fuses it with what uses it: no mask is stored, every device computes its
  own part, and it costs a fraction of JAX's generators, which would take longer
  than the layer itself.

  Reference: the multipliers and shifts are those of lowbias32, found by C.
  Wellons' search for integer hashes of low bias; the last round for a column
  leaves out what the high bits do not need.
  """
  words = jax.random.key_data(key).astype(jnp.uint32)
  rows = jnp.zeros(shape[:-1], jnp.uint32)
  for axis, size in enumerate(shape[:-1]):
    index = jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], axis)
    rows = rows * jnp.uint32(size) + index
  rows = _mix(_mix(rows ^ words[0]) + words[-1])
  columns = jnp.arange(shape[-1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
  x = (rows[..., None] ^ columns) * _FIRST
  return (x ^ (x >> 16)) * _SECOND


def _mix(x: UInt32[Array, '...']) -> UInt32[Array, '...']:
  """A bijection in which every bit depends on every other."""
  x = (x ^ (x >> 16)) * _FIRST
  x = (x ^ (x >> 15)) * _SECOND
  return x ^ (x >> 16)


def scaled(x: Array, factor: Any) -> Array:
  """x · factor; rounded to x's dtype after, not before, or it is biased."""
  return (x.astype(jnp.float32) * factor).astype(x.dtype)


def drop_path(
  x: Float[Array, 'n t d'],
  rate: Float[Array, ''],
  key: Key[Array, ''] | None,
) -> Float[Array, 'n t d']:
  """Zeroes the whole branch for a share `rate` of the examples.

  Reference: stochastic depth, Huang et al., arXiv 1603.09382.
  """
  if key is None:
    return x
  keep = 1 - rate
  kept = jax.random.uniform(key, (x.shape[0], 1, 1)) < keep
  return jnp.where(kept, scaled(x, 1 / keep), 0)
