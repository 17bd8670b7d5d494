"""Copies whole arrays between hosts and devices."""

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import sharding


def place(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  """Converts a host array to a global array.

  Args:
    array: whole array, the same on every process.
    leaf: shape, dtype and sharding of the result.
  """
  cast = np.asarray(array, leaf.dtype)
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: cast[index]
  )


def to_host(array: jax.Array, mesh: Mesh) -> np.ndarray:
  """Returns a whole global array as a NumPy array, on every process.

  Args:
    array: global array.
    mesh: mesh of the devices that hold the array.
  """
  gather = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
  return np.asarray(gather(array))
