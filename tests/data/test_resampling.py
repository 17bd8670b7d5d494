"""Tests of resizing against formulas of the filters and OpenCV."""

import zlib

import cv2
import numpy as np
import pytest
from sample_images import noise

from vit_jax.data.images.decode import INTERPOLATIONS, resize

# Checksums of the results of an implementation of the filters in integers.
CHECKSUMS = {'bicubic': 0xB0CABD69, 'bilinear_antialias': 0x56EF162D}


@pytest.mark.parametrize('interpolation', CHECKSUMS)
def test_pillow_filters_are_exact(interpolation):
  """Results are bitwise equal for shrinking, enlarging and both at once."""
  checksum = 0
  for seed in range(25):
    sizes = np.random.default_rng(seed).integers(1, 90, 4).tolist()
    resized = resize(noise(*sizes[:2]), *sizes[2:], interpolation)
    checksum = zlib.crc32(resized.tobytes(), checksum)
  assert checksum == CHECKSUMS[interpolation]


def test_shrinking_by_four():
  """Area averages 4 x 4 pixels; bilinear only the four in their middle."""
  image = noise(12, 20)
  blocks = image.reshape(3, 4, 5, 4, 3)
  area, bilinear = resize(image, 3, 5, 'area'), resize(image, 3, 5)
  assert np.abs(area - blocks.mean(axis=(1, 3))).max() <= 0.5
  middle = blocks[:, 1:3, :, 1:3]
  assert np.abs(bilinear - middle.mean(axis=(1, 3))).max() <= 0.5


@pytest.mark.parametrize('height, width', [(30, 40), (5, 40), (30, 7)])
def test_area_enlarges_smoothly(height, width):
  """Growing axes are bilinear, without blocks; shrinking axes are averaged."""
  image = noise(10, 13)
  resized = resize(image, height, width, 'area').astype(int)
  if height > 10 and width > 13:
    np.testing.assert_array_equal(resized, cv2.resize(image, (width, height)))
  nearest = resize(image, height, width, 'nearest').astype(int)
  for axis in range(2):
    if (height, width)[axis] > image.shape[axis]:
      steps, blocks = (
        np.abs(np.diff(x, axis=axis)).max() for x in (resized, nearest)
      )
      assert steps < blocks


@pytest.mark.parametrize('interpolation', INTERPOLATIONS)
def test_constants_and_sizes_are_preserved(interpolation):
  """Constant images stay constant; images of the same size are unchanged."""
  flat = np.full((7, 31, 3), (0, 100, 255), np.uint8)
  for height, width in [(1, 1), (3, 64), (50, 5)]:
    resized = resize(flat, height, width, interpolation)
    assert resized.shape == (height, width, 3)
    assert (resized == (0, 100, 255)).all()
  image = noise(7, 31)
  np.testing.assert_array_equal(resize(image, 7, 31, interpolation), image)
