"""Attention distance, by hand and for heads that look a fixed way."""

import numpy as np

from vit_jax.analysis import distance


def looking(grid, offset, prefix=0):
  """A head whose every patch looks `offset` (rows, columns) on, cyclically."""
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
  between = distance.between((2, 2), 16)
  diagonal = 16 * 2**0.5
  expected = [
    [0, 16, 16, diagonal],
    [16, 0, diagonal, 16],
    [16, diagonal, 0, 16],
    [diagonal, 16, 16, 0],
  ]
  np.testing.assert_allclose(between, expected)


def test_a_wide_grid_has_rows_first():
  """Patches 0 and 3 of 2x3: one below the other."""
  assert distance.between((2, 3), 4)[0].tolist() == [
    *(0, 4, 8),
    *(4, 32**0.5, 80**0.5),
  ]


def test_heads_that_look_a_fixed_way():
  """3x3 patches of 8 px: to oneself, a row on (the last goes back two)."""
  heads = [looking((3, 3), offset) for offset in ((0, 0), (1, 0), (0, 2))]
  attention = np.array(heads)[None, None]
  result = distance.of_heads(attention, (3, 3), 8)
  row_on = (8 + 8 + 16) / 3
  two_columns_on = (16 + 8 + 8) / 3
  np.testing.assert_allclose(result[0, 0], [0, row_on, two_columns_on])


def test_equal_attention_is_the_mean_of_all_distances():
  attention = np.full((2, 1, 1, 9, 9), 1 / 9)
  result = distance.of_heads(attention, (3, 3), 8)
  np.testing.assert_allclose(result, distance.between((3, 3), 8).mean())


def test_tokens_before_the_patches_are_left_out():
  """As queries and as keys; what patches give to them is no distance."""
  weights = looking((3, 3), (1, 0), prefix=2)
  weights[2:] /= 2
  weights[2:, 0] = 0.5
  result = distance.of_heads(weights[None, None, None], (3, 3), 8)
  np.testing.assert_allclose(result, (8 + 8 + 16) / 3 / 2)
