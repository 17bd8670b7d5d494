"""Tests of resized position embeddings against SciPy and torch."""

import numpy as np
import pytest
import scipy.ndimage
import torch

from vit_jax.errors import UserError
from vit_jax.models import positions

GRIDS = [
  ((14, 14), (24, 24)),
  ((14, 14), (7, 7)),
  ((14, 14), (27, 27)),
  ((16, 16), (16, 32)),
  ((7, 7), (12, 5)),
  ((4, 6), (9, 3)),
  ((5, 3), (1, 1)),
]


def embedding(grid, prefix=1, width=6):
  """Returns random embeddings of `prefix` tokens and of a grid."""
  shape = (1, prefix + grid[0] * grid[1], width)
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def resized(name, table, *grids_and_method):
  return positions.resize({f'x/{name}': table}, *grids_and_method)[f'x/{name}']


@pytest.mark.parametrize('old, new', GRIDS)
def test_aligned_resize_equals_scipys_zoom(old, new):
  """The authors' code zooms linearly with aligned corners, and so do we."""
  slots = embedding(old)
  result = resized('embedding', slots, old, new, 'aligned')
  grid = slots[0, 1:].reshape(*old, -1)
  zoom = (new[0] / old[0], new[1] / old[1], 1)
  expected = scipy.ndimage.zoom(grid, zoom, order=1)
  assert expected.shape[:2] == new
  np.testing.assert_allclose(
    result[0, 1:], expected.reshape(-1, slots.shape[-1]), rtol=1e-5, atol=1e-6
  )
  default = resized('embedding', slots, old, new, None)
  np.testing.assert_array_equal(default, result)


@pytest.mark.parametrize('old, new', [(o, n) for o, n in GRIDS if o != n])
def test_bicubic_resize_equals_torch(old, new):
  """Antialiased, with half-pixel centres, as in timm."""
  slots = embedding(old)
  result = resized('embedding', slots, old, new, 'bicubic')
  grid = torch.tensor(slots[:, 1:]).reshape(1, *old, -1).permute(0, 3, 1, 2)
  expected = torch.nn.functional.interpolate(
    grid, size=new, mode='bicubic', antialias=True, align_corners=False
  )
  expected = expected.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], -1)
  np.testing.assert_allclose(result[:, 1:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('method', positions.METHODS)
def test_properties_of_all_methods(method):
  """Prefix embeddings, the same grid, and constants do not change."""
  for prefix in (0, 1, 2):
    slots = embedding((4, 6), prefix)
    result = resized('embedding', slots, (4, 6), (5, 5), method)
    assert result.shape == (1, prefix + 25, 6) and result.dtype == np.float32
    np.testing.assert_array_equal(result[:, :prefix], slots[:, :prefix])
    same = resized('embedding', slots, (4, 6), (4, 6), method)
    np.testing.assert_array_equal(same, slots)
  # Interpolation weights sum to one everywhere, also at the edges.
  slots = np.full((1, 1 + 24, 2), 0.7, np.float32)
  result = resized('embedding', slots, (4, 6), (11, 3), method)
  np.testing.assert_allclose(result, 0.7, rtol=1e-5)


def test_messages_of_wrong_grids_and_methods():
  with pytest.raises(UserError, match='4x7 grid'):
    resized('embedding', embedding((4, 6)), (4, 7), (2, 2), None)
  with pytest.raises(UserError, match='aligned'):
    resized('embedding', embedding((4, 6)), (4, 6), (2, 2), 'nearest')


def test_square_grid():
  """It needs a square number of patches; others need the image size."""
  assert positions.square_grid(196) == (14, 14)
  with pytest.raises(UserError, match='195'):
    positions.square_grid(195)
