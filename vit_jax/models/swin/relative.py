"""Relative position biases: indices into the table, and its interpolation."""

import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.models.layers.positions import resizing


def index(size: int) -> Int[np.ndarray, 's s']:
  """Returns the row of the table for each pair (query, key) of a window.

  The row is (Δrow + W − 1)·(2W − 1) + Δcolumn + W − 1, with Δ = query − key.

  Args:
    size: side W of the window in tokens; a window has W² tokens.

  Reference: section 3.2, equation 4, in the order of the authors' code.
  """
  tokens = np.arange(size**2)
  rows, columns = tokens // size, tokens % size
  rows = rows[:, None] - rows[None, :] + size - 1
  columns = columns[:, None] - columns[None, :] + size - 1
  return rows * (2 * size - 1) + columns


def window_of(rows: int) -> int:
  """Returns the side W of the windows of a table with (2W − 1)² rows.

  Args:
    rows: number of rows of the table.
  """
  return (round(rows**0.5) + 1) // 2


def resize(
  table: Float[Array | np.ndarray, 'l rows heads'], size: int
) -> Float[np.ndarray, 'l _ heads']:
  """Returns tables for other windows, by bicubic interpolation of each head.

  Args:
    table: tables of several layers, for windows of any size.
    size: side of the new windows in tokens.

  Reference: section 3.2, "Relative position bias", and the authors' code:
  half-pixel centers, no antialiasing, edges repeated.
  """
  layers, rows, heads = table.shape
  old, new = 2 * window_of(rows) - 1, 2 * size - 1
  if old == new:
    return np.asarray(table, np.float32)
  maps = np.asarray(table, np.float64).reshape(layers, old, old, heads)
  weights = resizing.cubic(old, new)
  maps = np.einsum('yi,xj,lijh->lyxh', weights, weights, maps)
  return maps.reshape(layers, new**2, heads).astype(np.float32)
