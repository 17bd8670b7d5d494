"""Checksums of sharded arrays, computed on their devices.

Each element's bits are hashed together with its global index, and the hashes
are added modulo 2^32. Addition commutes, so the sum does not depend on mesh,
layout or number of processes. Flipping one bit always changes the sum, because
the hash is a permutation; swapping two different elements almost always does.
"""

import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

from vit_jax.arrays import sharding, tree


def _hash(x: UInt32[Array, '...']) -> UInt32[Array, '...']:
  """Applies the finalizer of MurmurHash3, a permutation of 32-bit words."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def array_checksum(x: Shaped[Array, '...']) -> UInt32[Array, '']:
  """Returns the sum of hash(bits ⊕ hash(global index)) modulo 2^32.

  Args:
    x: floats or integers of at most 32 bits, or booleans.

  Returns:
    Scalar, uint32.
  """
  if x.dtype == jnp.bool_:
    bits = x.astype(jnp.uint32)
  else:
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
  index = jnp.zeros((), jnp.uint32)
  for dim, size in enumerate(x.shape):
    position = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    index = index * jnp.uint32(size) + position
  return jnp.sum(_hash(bits ^ _hash(index + 1)), dtype=jnp.uint32)


@functools.cache
def _compiled(replicated: Any) -> Any:
  """Returns a function that computes checksums; cached, so it traces once."""
  return jax.jit(
    lambda leaves: [array_checksum(leaf) for leaf in leaves],
    out_shardings=replicated,
  )


def checksums(state: tree.PyTree) -> dict[str, int]:
  """Returns a checksum of every leaf, by path.

  Args:
    state: global arrays on one mesh.
  """
  flat = tree.flatten(state)
  mesh = next(iter(flat.values())).sharding.mesh
  compiled = _compiled(sharding.replicated(mesh))
  sums = jax.device_get(compiled(list(flat.values())))
  return {path: int(value) for path, value in zip(flat, sums, strict=True)}


def digest(params: tree.PyTree) -> str:
  """Computes a digest of arrays on one mesh, independent of the mesh.

  Args:
    params: tree of global arrays.

  Returns:
    16 hexadecimal digits.
  """
  text = json.dumps(checksums(params), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]
