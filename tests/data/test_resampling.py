"""Resizing against the filters' mathematics, means over areas, and OpenCV."""

import cv2
import numpy as np
import pillow_arithmetic
import pytest
from pictures import noise

from vit_jax.data.images.resampling import INTERPOLATIONS, resize

PILLOW = ('bicubic', 'bilinear_antialias')


@pytest.mark.parametrize('interpolation', PILLOW)
@pytest.mark.parametrize('seed', range(25))
def test_the_filters_of_pillow(interpolation, seed):
  """To the bit, shrinking, enlarging and both at once, from and to any size."""
  y, x, height, width = np.random.default_rng(seed).integers(1, 90, 4).tolist()
  image = noise(y, x)
  np.testing.assert_array_equal(
    resize(image, height, width, interpolation),
    pillow_arithmetic.resize(image, height, width, interpolation),
  )


def test_area_averages():
  """By a whole factor, each pixel is the mean of those it covers."""
  image = noise(12, 20)
  means = image.reshape(3, 4, 5, 4, 3).mean(axis=(1, 3))
  resized = resize(image, 3, 5, 'area')
  assert np.abs(resized - means).max() <= 0.5


@pytest.mark.parametrize('height, width', [(30, 40), (5, 40), (30, 7)])
def test_area_enlarges_smoothly(height, width):
  """An enlarged axis is bilinear, a shrunken one averaged: no mosaic."""
  image = noise(10, 13)
  resized = resize(image, height, width, 'area').astype(float)
  bilinear = cv2.resize(image, (width, height)).astype(float)
  if height > 10 and width > 13:
    np.testing.assert_array_equal(resized, bilinear)
  blocks = cv2.resize(image, (width, height), interpolation=cv2.INTER_NEAREST)
  for axis, (size, before) in enumerate(
    zip((height, width), (10, 13), strict=True)
  ):
    if size > before:
      steps = np.abs(np.diff(resized, axis=axis)).max()
      assert steps < np.abs(np.diff(blocks.astype(float), axis=axis)).max()


def test_bilinear_takes_four_neighbours():
  """By four, it is the mean of the middle 2 x 2 of each 4 x 4: aliasing."""
  image = noise(12, 20)
  middle = image.reshape(3, 4, 5, 4, 3)[:, 1:3, :, 1:3]
  resized = resize(image, 3, 5)
  assert np.abs(resized - middle.mean(axis=(1, 3))).max() <= 0.5
  np.testing.assert_array_equal(resized, cv2.resize(image, (5, 3)))


@pytest.mark.parametrize('interpolation', INTERPOLATIONS)
def test_constants_and_sizes_stay(interpolation):
  """A flat image stays flat, an image of the wanted size as it is."""
  flat = np.full((7, 31, 3), (0, 100, 255), np.uint8)
  for height, width in [(1, 1), (3, 64), (50, 5)]:
    resized = resize(flat, height, width, interpolation)
    assert resized.shape == (height, width, 3)
    assert (resized == (0, 100, 255)).all()
  image = noise(7, 31)
  np.testing.assert_array_equal(resize(image, 7, 31, interpolation), image)
