"""Positions without parameters: sine-cosine tables and rotations."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_TEMPERATURE = 10_000.0
_ROPE_BASE = 100.0


def sincos2d(
  grid: tuple[int, int], width: int, last_included: bool
) -> Float[np.ndarray, 't d']:
  """Returns position embeddings: sines and cosines of column, then of row.

  There are two variants. Both have the frequencies 10000^(-i/n) for i from 0 to
  width/4 − 1. In big_vision n is width/4 − 1, so that the last frequency is
  1/10000; in MAE (arXiv 2111.06377) n is width/4.

  Args:
    grid: (rows, columns) of patches.
    width: channels of a token; a multiple of 4.
    last_included: True for the variant of big_vision.

  Returns:
    The table, `[rows · columns, width]`, float32.
  """
  count = width // 4
  exponents = np.arange(count) / max(count - 1 if last_included else count, 1)
  frequencies = _TEMPERATURE**-exponents
  rows, columns = (np.ravel(x) for x in np.mgrid[: grid[0], : grid[1]])
  parts = []
  for position in (columns, rows):
    angles = np.outer(position, frequencies)
    parts += [np.sin(angles), np.cos(angles)]
  return np.concatenate(parts, axis=1).astype(np.float32)


def rotations2d(
  grid: tuple[int, int], channels: int
) -> tuple[Float[np.ndarray, 't c'], Float[np.ndarray, 't c']]:
  """Returns sines and cosines of the rotation angles of queries and keys.

  The center of a patch has coordinates in (-1, 1) on each axis, so that images
  of all sizes have the same range. Channels i and i + channels/2 form a plane.
  The angles of the first quarter of the channels depend on the row, those of
  the second quarter on the column, with wavelengths 100^(i / (channels/4)).

  Args:
    grid: (rows, columns) of patches.
    channels: channels of a head; a multiple of 4.

  Returns:
    Sines and cosines, each `[rows · columns, channels]`, float32.

  Reference: DINOv3 (arXiv 2508.10104), without its random coordinates.
  """
  count = channels // 4
  wavelengths = _ROPE_BASE ** (np.arange(count) / count)
  centers = [2 * (np.arange(n) + 0.5) / n - 1 for n in grid]
  coordinates = np.stack(np.meshgrid(*centers, indexing='ij'), axis=-1)
  angles = (
    2 * np.pi * coordinates[..., None] / wavelengths
  )  # [rows, columns, 2, i]
  angles = np.tile(angles.reshape(-1, channels // 2), 2)
  return np.sin(angles).astype('float32'), np.cos(angles).astype('float32')


def rotate(
  x: Float[Array, 'n t h c'],
  sines: Float[Array, '#n t c'],
  cosines: Float[Array, '#n t c'],
) -> Float[Array, 'n t h c']:
  """Rotates the planes (i, i + c/2) of every head, in float32.

  Args:
    x: queries or keys.
    sines: sines of the angles from `rotations2d`.
    cosines: cosines of the angles from `rotations2d`.

  Returns:
    The rotated array, in the dtype of `x`.
  """
  wide = x.astype(jnp.float32)
  first, second = jnp.split(wide, 2, axis=-1)
  rotated = jnp.concatenate([-second, first], axis=-1)
  y = wide * cosines[:, :, None] + rotated * sines[:, :, None]
  return y.astype(x.dtype)
