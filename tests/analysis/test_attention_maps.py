"""Tests of rollout and attention distance against values by hand."""

import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from vit_jax.analysis.figures import (
  head_distances,
  image_mask,
  on_patches,
  rollout,
)


def random_attention(*shape):
  logits = np.random.default_rng(0).normal(size=shape)
  weights = np.exp(logits)
  return weights / weights.sum(-1, keepdims=True)


def test_two_tokens_by_hand():
  """One layer, two heads: (A + I) / 2 of the mean over heads."""
  attention = np.array([[[1.0, 0], [0, 1]], [[0, 1], [0.5, 0.5]]])[None, None]
  expected = [[0.75, 0.25], [0.125, 0.875]]  # the mean is [[.5 .5], [.25 .75]]
  np.testing.assert_allclose(rollout(attention)[0], expected)
  plain = rollout(attention, residual=False)[0]
  np.testing.assert_allclose(plain, [[0.5, 0.5], [0.25, 0.75]])


def test_rows_sum_to_one_and_loops_agree():
  attention = random_attention(2, 3, 4, 5, 5)
  rolled = rollout(attention)
  np.testing.assert_allclose(rolled.sum(-1), 1)
  for image in range(2):
    joint = np.eye(5)
    for layer in range(3):
      mean = sum(attention[image, layer]) / 4 + np.eye(5)
      joint = (mean / mean.sum(1, keepdims=True)) @ joint
    np.testing.assert_allclose(rolled[image], joint)


def test_query_is_the_class_token_or_the_mean_of_patches():
  """Two tokens precede the patches, which are numbered row by row."""
  weights = np.arange(16.0).reshape(1, 4, 4)
  token = on_patches(weights, (1, 2), by_token=True)
  assert token.tolist() == [[[2, 3]]]
  patches = on_patches(weights, (1, 2), by_token=False)
  assert patches.tolist() == [[[12, 13]]]  # rows 2 and 3: (10 + 14) / 2, …
  grid = on_patches(np.arange(49.0).reshape(7, 7), (2, 3), by_token=True)
  assert grid.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize('grid, side', [((8, 8), 8), ((6, 8), 16)])
def test_mask_is_blurred_by_the_side_of_a_patch(grid, side):
  """Pillow approximates the Gaussian filter of SciPy, the reference."""
  weights = np.zeros(grid)
  weights[2:4, 3:5] = 1
  height, width = grid[0] * side, grid[1] * side
  picture = Image.fromarray((255 * weights).astype(np.float32))
  sharp = np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS))

  def blurred(sigma):
    smooth = scipy.ndimage.gaussian_filter(
      np.clip(sharp, 0, 255), sigma, mode='nearest'
    )
    return (smooth - smooth.min()) / (smooth.max() - smooth.min())

  mask = image_mask(weights, (height, width))
  assert np.abs(mask - blurred(side)).max() < 0.06
  for wrong in (side / 2, 0.75 * side, 1.5 * side):
    assert np.abs(mask - blurred(wrong)).max() > 0.12


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


def test_heads_with_a_constant_offset():
  """With 3x3 patches, a cyclic offset of one row is two rows for the last."""
  offsets = (0, 0), (1, 0), (0, 2), (1, 1)
  heads = np.array([shifted((3, 3), offset) for offset in offsets])
  result = head_distances(heads[None, None], (3, 3), 8)
  one_row = two_columns = (8 + 8 + 16) / 3
  diagonals = 8 * (4 * 2**0.5 + 4 * 5**0.5 + 8**0.5) / 9
  expected = [0, one_row, two_columns, diagonals]
  np.testing.assert_allclose(result[0, 0], expected)


def test_tokens_before_the_patches_are_left_out():
  """They are not queries, and attention to them counts as distance 0."""
  weights = shifted((3, 3), (1, 0), prefix=2)
  weights[2:] /= 2
  weights[2:, 0] = 0.5
  result = head_distances(weights[None, None, None], (3, 3), 8)
  np.testing.assert_allclose(result, (8 + 8 + 16) / 3 / 2)
