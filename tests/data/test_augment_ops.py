"""Tests of colour and geometry operations against Pillow."""

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from sample_images import noise

from vit_jax.data.augment import policies

FACTORS = (0.0, 0.1, 0.5, 1.0, 1.3, 1.9)
GREY = (128, 128, 128)


def photograph():
  """Returns an image with edges and shades, uint8 [60, 80, 3]."""
  shapes = cv2.resize(noise(6, 8), (80, 60), interpolation=cv2.INTER_CUBIC)
  shapes[10:30, 20:50] = (250, 30, 90)
  scale = np.array([0.5, 0.8, 0.3])
  return (40 + scale * shapes).astype(np.uint8)


IMAGES = {
  'photograph': photograph(),
  'noise': noise(31, 17),
  'flat': np.full((9, 8, 3), (3, 100, 255), np.uint8),
  'pixel': noise(1, 1),
  'two values': np.array([[[0, 7, 255], [255, 7, 0]]] * 300, np.uint8),
}


def pillow(function, image, *arguments):
  return np.array(function(Image.fromarray(image), *arguments)).astype(int)


@pytest.mark.parametrize('image', IMAGES.values(), ids=IMAGES)
def test_single_value_operations_equal_pillow(image):
  pairs = [
    (policies.invert(image), pillow(ImageOps.invert, image)),
    (policies.auto_contrast(image), pillow(ImageOps.autocontrast, image)),
    (policies.equalize(image), pillow(ImageOps.equalize, image)),
    (policies.solarize(image), pillow(ImageOps.solarize, image)),
  ]
  for bits in range(1, 9):
    expected = pillow(ImageOps.posterize, image, bits)
    pairs.append((policies.posterize(image, bits), expected))
  for threshold in (0, 1, 77, 255, 256):
    expected = pillow(ImageOps.solarize, image, threshold)
    pairs.append((policies.solarize(image, threshold), expected))
  for ours, theirs in pairs:
    assert ours.dtype == np.uint8
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize('image', IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize('factor', FACTORS)
@pytest.mark.parametrize(
  'name', ['brightness', 'contrast', 'color', 'sharpness']
)
def test_enhancements_are_close_to_pillow(image, factor, name):
  """Results differ by up to two levels: Pillow truncates, OpenCV rounds."""
  enhancer = getattr(ImageEnhance, name.capitalize())
  expected = pillow(lambda x: enhancer(x).enhance(factor), image)
  ours = getattr(policies, name)(image, factor)
  assert np.abs(ours - expected).max() <= 2
  if factor == 1:
    np.testing.assert_array_equal(ours, image)


def test_no_bits_and_solarize_add():
  """Operations that Pillow does not provide are compared with formulas."""
  image = noise(5, 5)
  assert not policies.posterize(image, 0).any()
  expected = np.where(image < 128, np.minimum(image + 110.0, 255), image)
  np.testing.assert_array_equal(policies.solarize_add(image, 110), expected)


def test_greyscale():
  """ITU-R 601 luma differs from Pillow's by at most one level."""
  image = photograph()
  expected = pillow(lambda x: x.convert('L').convert('RGB'), image)
  assert np.abs(policies.greyscale(image) - expected).max() <= 1


@pytest.mark.parametrize('sigma', [0.1, 0.5, 1.0, 2.0])
def test_blur(sigma):
  """Pillow approximates the blur by boxes, so only means are compared."""
  image = photograph()
  expected = pillow(lambda x: x.filter(ImageFilter.GaussianBlur(sigma)), image)
  assert np.abs(policies.blur(image, sigma) - expected).mean() < 0.5


def transformed(image, *matrix):
  return pillow(
    lambda x: x.transform(
      x.size,
      Image.Transform.AFFINE,
      matrix,
      resample=Image.Resampling.BILINEAR,
      fillcolor=GREY,
    ),
    image,
  )


def turned(image, degrees):
  method = Image.Resampling.BILINEAR
  return pillow(lambda x: x.rotate(degrees, method, fillcolor=GREY), image)


@pytest.mark.parametrize('share', [-1.0, -0.4, 0.0, 0.7, 1.0])
def test_geometry_operations_equal_pillow(share):
  """Results differ at the seam to the outside, which Pillow blends less.

  Elsewhere, OpenCV's weights of 1/32 differ by at most two levels.
  """
  image = photograph()
  slope, pixels, degrees = 0.3 * share, 20 * share, 30 * share
  pairs = [
    (policies.rotate(image, degrees), turned(image, degrees)),
    (policies.shear_x(image, slope), transformed(image, 1, slope, 0, 0, 1, 0)),
    (policies.shear_y(image, slope), transformed(image, 1, 0, 0, slope, 1, 0)),
    (
      policies.translate_x(image, pixels),
      transformed(image, 1, 0, pixels, 0, 1, 0),
    ),
    (
      policies.translate_y(image, pixels),
      transformed(image, 1, 0, 0, 0, 1, pixels),
    ),
  ]
  for ours, theirs in pairs:
    close = np.abs(ours - theirs).max(axis=2) <= 2
    assert close.mean() > 0.97


def test_bicubic_geometry_is_pillows():
  """Results are bitwise equal to timm's call of Pillow with a fill colour."""
  image, mean = noise(20, 30), (124, 116, 104)
  method = Image.Resampling.BICUBIC
  for degrees in (-30.0, 7.5):
    expected = Image.fromarray(image).rotate(degrees, method, fillcolor=mean)
    actual = policies.rotate(image, degrees, bicubic=True, fill=mean)
    difference = np.abs(np.array(expected).astype(int) - actual)
    assert np.mean(difference > 1) < 0.01  # Pillow rounds the matrix
  sheared = Image.fromarray(image).transform(
    image.shape[1::-1],
    Image.Transform.AFFINE,
    (1, 0.3, 0, 0, 1, 0),
    method,
    fillcolor=mean,
  )
  actual = policies.shear_x(image, 0.3, bicubic=True, fill=mean)
  np.testing.assert_array_equal(np.array(sheared), actual)
  assert (
    policies.translate_x(image, 5.0, bicubic=True, fill=mean)[:, -5:] == mean
  ).all()
