"""Tests of attention distance against values by hand."""

import numpy as np

from vit_jax.analysis.figures import head_distances, patch_distances


def shifted(grid, offset, prefix=0):
  """Returns a head whose patches attend to the patch at a cyclic offset.

  Args:
    grid: rows and columns of patches.
    offset: rows and columns from the query to the key.
    prefix: number of tokens that precede the patches.
  """
  rows, columns = grid
  count = rows * columns
  weights = np.zeros((prefix + count, prefix + count))
  weights[:prefix] = 1 / (prefix + count)
  for token in range(count):
    y, x = divmod(token, columns)
    y, x = (y + offset[0]) % rows, (x + offset[1]) % columns
    weights[prefix + token, prefix + y * columns + x] = 1
  return weights


def test_distances_of_a_grid_by_hand():
  between = patch_distances((2, 2), 16)
  diagonal = 16 * 2**0.5
  expected = [
    [0, 16, 16, diagonal],
    [16, 0, diagonal, 16],
    [16, diagonal, 0, 16],
    [diagonal, 16, 16, 0],
  ]
  np.testing.assert_allclose(between, expected)


def test_heads_with_a_constant_offset():
  """With 3x3 patches, a cyclic offset of one row is two rows for the last."""
  heads = [shifted((3, 3), offset) for offset in ((0, 0), (1, 0), (0, 2))]
  attention = np.array(heads)[None, None]
  result = head_distances(attention, (3, 3), 8)
  one_row = (8 + 8 + 16) / 3
  two_columns = (16 + 8 + 8) / 3
  np.testing.assert_allclose(result[0, 0], [0, one_row, two_columns])


def test_tokens_before_the_patches_are_left_out():
  """They are not queries, and attention to them counts as distance 0."""
  weights = shifted((3, 3), (1, 0), prefix=2)
  weights[2:] /= 2
  weights[2:, 0] = 0.5
  result = head_distances(weights[None, None, None], (3, 3), 8)
  np.testing.assert_allclose(result, (8 + 8 + 16) / 3 / 2)
