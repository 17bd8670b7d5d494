"""Windows of a Swin block: their size and shift, cutting and joining.

A map that windows do not fill is padded with zeros below and on the right. The
padding takes part in attention, as in the authors' code for detection (their
code for classification rejects such maps).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError

RULES = ('authors', 'timm')
_MASKED = -100.0  # added to logits of tokens from opposite edges of the map


class Windows(NamedTuple):
  """The windows of a block.

  Attributes:
    rows: rows of the map of tokens.
    columns: columns of the map.
    size: side of a window in tokens.
    shift: (down, right), numbers of tokens by which the windows are moved.
    pad_after_shift: whether the map is padded after it is shifted.
  """

  rows: int
  columns: int
  size: int
  shift: tuple[int, int]
  pad_after_shift: bool = False

  @classmethod
  def of(
    cls,
    grid: tuple[int, int],
    size: int,
    shifted: bool,
    rule: str = 'authors',
  ) -> 'Windows':
    """Returns the windows of a block.

    Windows are not larger than the map. Windows that fill a side of the map are
    not shifted.

    Args:
      grid: rows and columns of tokens.
      size: side of a window in tokens.
      shifted: whether windows are shifted, by ⌊size / 2⌋.
      rule: 'authors' or 'timm', see `Config.window_rule`.

    Raises:
      UserError: timm would use windows that are not square.
    """
    rows, columns = grid
    largest = min(grid)
    if rule == 'authors':
      shift = size // 2 if shifted and largest > size else 0
      return cls(rows, columns, min(size, largest), (shift, shift))
    if largest < size and rows != columns:
      raise UserError(
        f"model.window_rule='timm' does not support a feature map of {rows}x"
        f'{columns} tokens with model.window_size={size}: timm uses windows of '
        f'{min(rows, size)}x{min(columns, size)} tokens for it, and only '
        'square windows are supported. Use square or larger images.'
      )
    size = min(size, largest)
    down, right = (size // 2 if shifted and n > size else 0 for n in grid)
    return cls(rows, columns, size, (down, right), pad_after_shift=True)

  @property
  def padded(self) -> tuple[int, int]:
    """Rows and columns including the padding: multiples of the window size."""
    rows, columns = (
      math.ceil(side / self.size) * self.size
      for side in (self.rows, self.columns)
    )
    return rows, columns

  def cut(self, x: Float[Array, 'n t d']) -> Float[Array, 'n w s d']:
    """Cuts a map into windows.

    Args:
      x: tokens of the map, row by row.

    Returns:
      Tokens of each window; windows and their tokens are ordered row by row.
    """
    n, _, width = x.shape
    x = x.reshape(n, self.rows, self.columns, width)
    # Rolling the map up and left moves the windows down and right.
    if self.pad_after_shift:
      x = self._pad(self._roll(x, -1))
    else:
      x = self._roll(self._pad(x), -1)
    return self._windows(x)

  def _pad(self, x: Float[Array, 'n y x d']) -> Float[Array, 'n py px d']:
    below, right = (
      padded - side
      for padded, side in zip(self.padded, x.shape[1:3], strict=True)
    )
    if not below and not right:
      return x
    return jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0)))

  def _roll(
    self, x: Float[Array, 'n y x d'], sign: int
  ) -> Float[Array, 'n y x d']:
    if not any(self.shift):
      return x
    down, right = self.shift
    return jnp.roll(x, (sign * down, sign * right), axis=(1, 2))

  def _windows(self, x: Float[Array, 'n y x d']) -> Float[Array, 'n w s d']:
    n, rows, columns, width = x.shape
    x = x.reshape(n, rows // self.size, self.size, -1, self.size, width)
    x = x.swapaxes(2, 3)  # [n, rows, columns of windows, size, size, d]
    return x.reshape(n, -1, self.size**2, width)

  def join(self, windows: Float[Array, 'n w s d']) -> Float[Array, 'n t d']:
    """Joins windows to a map; the inverse of `cut`.

    Args:
      windows: tokens of each window.
    """
    n, _, _, width = windows.shape
    rows, columns = self.padded
    x = windows.reshape(
      n, rows // self.size, columns // self.size, self.size, self.size, width
    )
    x = x.swapaxes(2, 3).reshape(n, rows, columns, width)
    # The steps of `cut` are undone in reverse order.
    if self.pad_after_shift:
      x = self._roll(x[:, : self.rows, : self.columns], 1)
    else:
      x = self._roll(x, 1)[:, : self.rows, : self.columns]
    return x.reshape(n, -1, width)

  def mask(self) -> Float[np.ndarray, 'w s s'] | None:
    """Returns the mask that is added to the logits; None without a shift.

    A shift brings opposite edges of the map together. The mask keeps tokens
    from attending to tokens of the opposite edge.

    Reference: section 3.2, "Efficient batch computation for shifted
    configuration".
    """
    if not any(self.shift):
      return None
    sides = []
    for length, shift in zip(self.padded, self.shift, strict=True):
      position = np.arange(length)
      # After the shift, the last `shift` tokens are those of the opposite edge.
      # The window with these tokens is the last one, from `length - size`.
      edges = length - self.size, length - shift
      sides.append(sum((position >= edge).astype(np.int32) for edge in edges))
    # Each of 3 x 3 regions has a number; only within a region are tokens
    # neighbors in the original map.
    regions = 3 * sides[0][:, None] + sides[1][None, :]
    rows, columns = (length // self.size for length in self.padded)
    regions = regions.reshape(rows, self.size, columns, self.size)
    regions = regions.swapaxes(1, 2).reshape(rows * columns, self.size**2)
    differ = regions[:, :, None] != regions[:, None, :]
    return np.where(differ, np.float32(_MASKED), np.float32(0))
