"""Splits maps into patches."""

from jaxtyping import Array, Num


def cut(
  x: Num[Array, 'n y x c'], grid: tuple[int, int], sides: tuple[int, int]
) -> Num[Array, 'n p h w c']:
  """Splits maps into patches, row by row.

  A convolution whose stride is its size is a matrix product with the values of
  each patch.

  Args:
    x: maps; values below and on the right of the last patches are dropped.
    grid: rows and columns of patches.
    sides: height and width of a patch.
  """
  (rows, columns), (height, width) = grid, sides
  n, *_, channels = x.shape
  x = x[:, : rows * height, : columns * width]
  x = x.reshape(n, rows, height, columns, width, channels)
  x = x.transpose(0, 1, 3, 2, 4, 5)  # [n, rows, columns, height, width, c]
  return x.reshape(n, rows * columns, height, width, channels)
