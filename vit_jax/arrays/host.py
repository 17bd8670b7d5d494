"""Whole arrays between hosts and devices."""

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import sharding


def place(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  """Puts a host array (the same on every process) where a leaf lives."""
  cast = np.asarray(array, leaf.dtype)
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: cast[index]
  )


def to_host(array: jax.Array, mesh: Mesh) -> np.ndarray:
  """Returns the whole of a global array, on every process."""
  gather = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
  return np.asarray(gather(array))
