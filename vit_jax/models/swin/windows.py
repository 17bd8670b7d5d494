"""Windows on a map of tokens: how large, how far shifted, cut and put back.

A map that windows do not fill is padded with zeros below and on the right
before it is shifted; the padding takes part in attention, as in the authors'
code for detection (their code for classification refuses such maps).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_MASKED = -100.0  # added to logits between tokens that are no neighbours


class Windows(NamedTuple):
  """The windows of one block.

  Attributes:
    rows: of the map of tokens.
    columns: of the map.
    size: side of a window, tokens.
    shift: how far the windows lie below and right of the plain ones.
  """

  rows: int
  columns: int
  size: int
  shift: int

  @classmethod
  def of(cls, grid: tuple[int, int], size: int, shifted: bool) -> 'Windows':
    """Those of a block: no larger than the map, and then not shifted.

    Args:
      grid: rows and columns of tokens.
      size: wanted side of a window.
      shifted: whether the block is one of those that shift, by ⌊size / 2⌋.
    """
    if min(grid) <= size:
      return cls(*grid, size=min(grid), shift=0)
    return cls(*grid, size=size, shift=size // 2 if shifted else 0)

  @property
  def padded(self) -> tuple[int, int]:
    """Rows and columns with the padding: multiples of the size."""
    rows, columns = (
      math.ceil(side / self.size) * self.size
      for side in (self.rows, self.columns)
    )
    return rows, columns

  def cut(self, x: Float[Array, 'n t d']) -> Float[Array, 'n w s d']:
    """The tokens of a map, in rows, by windows; the windows are in rows too."""
    n, _, width = x.shape
    x = x.reshape(n, self.rows, self.columns, width)
    more = [p - s for p, s in zip(self.padded, x.shape[1:3], strict=True)]
    if any(more):
      x = jnp.pad(x, ((0, 0), (0, more[0]), (0, more[1]), (0, 0)))
    if self.shift:
      x = jnp.roll(x, (-self.shift, -self.shift), axis=(1, 2))
    return self._windows(x)

  def _windows(self, x: Float[Array, 'n y x d']) -> Float[Array, 'n w s d']:
    n, rows, columns, width = x.shape
    x = x.reshape(n, rows // self.size, self.size, -1, self.size, width)
    x = x.swapaxes(2, 3)  # [n, rows, columns of windows, size, size, d]
    return x.reshape(n, -1, self.size**2, width)

  def join(self, windows: Float[Array, 'n w s d']) -> Float[Array, 'n t d']:
    """The inverse of `cut`."""
    n, _, _, width = windows.shape
    rows, columns = self.padded
    x = windows.reshape(
      n, rows // self.size, columns // self.size, self.size, self.size, width
    )
    x = x.swapaxes(2, 3).reshape(n, rows, columns, width)
    if self.shift:
      x = jnp.roll(x, (self.shift, self.shift), axis=(1, 2))
    x = x[:, : self.rows, : self.columns]
    return x.reshape(n, -1, width)

  def mask(self) -> Float[np.ndarray, 'w s s'] | None:
    """What is added to the logits of each window; None without a shift.

    Shifting brings opposite edges of the map together; tokens attend to those
    of their own side only.

    Reference: section 3.2, "Efficient batch computation for shifted
    configuration".
    """
    if not self.shift:
      return None
    sides = []
    for length in self.padded:
      place = np.arange(length)
      last = length - self.size, length - self.shift
      sides.append(sum((place >= edge).astype(np.int32) for edge in last))
    regions = 3 * sides[0][:, None] + sides[1][None, :]
    rows, columns = (length // self.size for length in self.padded)
    regions = regions.reshape(rows, self.size, columns, self.size)
    regions = regions.swapaxes(1, 2).reshape(rows * columns, self.size**2)
    differ = regions[:, :, None] != regions[:, None, :]
    return np.where(differ, np.float32(_MASKED), np.float32(0))
