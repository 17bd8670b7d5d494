"""Positions without parameters: sine-cosine tables and rotations."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_TEMPERATURE = 10_000.0
_ROPE_BASE = 100.0


def sincos2d(
  grid: tuple[int, int], width: int, last_included: bool
) -> Float[np.ndarray, 't d']:
  """Sines and cosines of the column, then those of the row.

  Two tables are in use. Both have the frequencies 10000^(-i/n), i from 0 to
  width/4 − 1; big_vision divides by n = width/4 − 1, so that the last one is
  1/10000, MAE (arXiv 2111.06377) by n = width/4.

  Args:
    grid: (rows, columns) of patches.
    width: of a token; a multiple of 4.
    last_included: big_vision's form.
  """
  count = width // 4
  exponents = np.arange(count) / max(count - 1 if last_included else count, 1)
  frequencies = _TEMPERATURE**-exponents
  rows, columns = (np.ravel(x) for x in np.mgrid[: grid[0], : grid[1]])
  parts = []
  for place in (columns, rows):
    angles = np.outer(place, frequencies)
    parts += [np.sin(angles), np.cos(angles)]
  return np.concatenate(parts, axis=1).astype(np.float32)


def rotations2d(
  grid: tuple[int, int], channels: int
) -> tuple[Float[np.ndarray, 't c'], Float[np.ndarray, 't c']]:
  """Sines and cosines of the angles by which patches turn queries and keys.

  The centre of a patch has coordinates in (-1, 1) on each axis, so that images
  of all sizes share them. Channel i and channel i + channels/2 are a plane; the
  first quarter of the channels turns with the row, the second with the column,
  with the wave lengths 100^(i / (channels/4)).

  Args:
    grid: (rows, columns) of patches.
    channels: of a head; a multiple of 4.

  Reference: DINOv3 (arXiv 2508.10104), without its random coordinates.
  """
  count = channels // 4
  wave_lengths = _ROPE_BASE ** (np.arange(count) / count)
  centres = [2 * (np.arange(n) + 0.5) / n - 1 for n in grid]
  places = np.stack(np.meshgrid(*centres, indexing='ij'), axis=-1)
  angles = 2 * np.pi * places[..., None] / wave_lengths  # [rows, columns, 2, i]
  angles = np.tile(angles.reshape(-1, channels // 2), 2)
  return np.sin(angles).astype('float32'), np.cos(angles).astype('float32')


def rotate(
  x: Float[Array, 'n t h c'],
  sines: Float[Array, '#n t c'],
  cosines: Float[Array, '#n t c'],
) -> Float[Array, 'n t h c']:
  """Turns the planes (i, i + c/2) of every head, in float32."""
  wide = x.astype(jnp.float32)
  first, second = jnp.split(wide, 2, axis=-1)
  turned = jnp.concatenate([-second, first], axis=-1)
  y = wide * cosines[:, :, None] + turned * sines[:, :, None]
  return y.astype(x.dtype)
