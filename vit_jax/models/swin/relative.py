"""Relative position biases: which of a table's rows, and other windows."""

import numpy as np
from jaxtyping import Array, Float, Int

_SHARPNESS = -0.75  # of the cubic kernel: PyTorch's, as the authors' code takes


def index(size: int) -> Int[np.ndarray, 's s']:
  """The table's row for each pair (query, key) of a window's tokens.

  (Δrow + W − 1)·(2W − 1) + Δcolumn + W − 1, with Δ = query − key.

  Args:
    size: side W of the window, so that there are W² tokens.

  Reference: section 3.2, equation 4, in the order of the authors' code.
  """
  places = np.arange(size**2)
  rows, columns = places // size, places % size
  rows = rows[:, None] - rows[None, :] + size - 1
  columns = columns[:, None] - columns[None, :] + size - 1
  return rows * (2 * size - 1) + columns


def window_of(rows: int) -> int:
  """The side of the windows that a table of (2W − 1)² rows is for."""
  return (round(rows**0.5) + 1) // 2


def resize(
  table: Float[Array | np.ndarray, 'l rows heads'], size: int
) -> Float[np.ndarray, 'l _ heads']:
  """Tables for other windows, by bicubic interpolation of each head's map.

  Args:
    table: of several layers, for windows of any side.
    size: side of the new windows.

  Reference: section 3.2, "Relative position bias", and the authors' code:
  half-pixel centres, no antialiasing, edges repeated.
  """
  layers, rows, heads = table.shape
  old, new = 2 * window_of(rows) - 1, 2 * size - 1
  if old == new:
    return np.asarray(table, np.float32)
  maps = np.asarray(table, np.float64).reshape(layers, old, old, heads)
  weights = _bicubic(old, new)
  maps = np.einsum('yi,xj,lijh->lyxh', weights, weights, maps)
  return maps.reshape(layers, new**2, heads).astype(np.float32)


def _bicubic(old: int, new: int) -> Float[np.ndarray, 'new old']:
  """Interpolation weights of one dimension."""
  at = (np.arange(new) + 0.5) * old / new - 0.5
  weights = np.zeros((new, old))
  for step in (-1, 0, 1, 2):  # the four nearest
    source = np.floor(at).astype(int) + step
    share = _cubic(np.abs(at - source))
    np.add.at(weights, (np.arange(new), source.clip(0, old - 1)), share)
  return weights


def _cubic(x: Float[np.ndarray, ' n']) -> Float[np.ndarray, ' n']:
  """Keys' kernel at a distance in [0, 2]."""
  a = _SHARPNESS
  near = ((a + 2) * x - (a + 3)) * x**2 + 1
  far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
  return np.where(x <= 1, near, far)
