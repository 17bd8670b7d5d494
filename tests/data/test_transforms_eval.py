"""Tests of evaluation resizing against closed forms and Pillow."""

import cv2
import numpy as np
import pytest
from sample_images import coordinates, noise, smooth

from vit_jax.data.augment.transforms import EvalTransform, TrainTransform
from vit_jax.data.images.decode import INTERPOLATIONS, resize
from vit_jax.data.images.headers import DecodeError


def sampled(length, out, start, scale):
  """Returns the source coordinates of `out` pixels, half-pixel centres."""
  return np.clip(start + (np.arange(out) + 0.5) * scale - 0.5, 0, length - 1)


def assert_sampled(transform, size, starts, scales, tolerance=0.99):
  """Checks that a result consists of pixels at a distance from a start.

  OpenCV's fixed-point numbers are sometimes truncated instead of rounded: an
  error below one grey level, which is one source pixel here.
  """
  pixels = transform.pixels(coordinates(*size))
  assert pixels.shape == (*transform.image_size, 3)
  rows, columns = map(sampled, size, pixels.shape[:2], starts, scales)
  assert np.abs(pixels[:, :, 0] - rows[:, None]).max() <= tolerance
  assert np.abs(pixels[:, :, 1] - columns).max() <= tolerance


@pytest.mark.parametrize(
  'size, image_size',
  [
    ((100, 200), (50, 50)),
    ((100, 200), (64, 48)),
    ((200, 100), (33, 77)),
    ((40, 30), (80, 90)),
    ((17, 256), (16, 16)),
  ],
)
def test_squash_uses_the_whole_image(size, image_size):
  """Each axis has its own scale, with half-pixel centres."""
  scales = np.divide(size, image_size)
  assert_sampled(EvalTransform(image_size), size, (0, 0), scales)


@pytest.mark.parametrize(
  'size, image_size, fraction',
  [
    ((192, 256), (112, 112), 0.875),
    ((256, 192), (112, 112), 0.875),
    ((200, 200), (50, 100), 0.875),
    ((100, 240), (60, 40), 1.0),
    ((64, 48), (96, 96), 0.5),
  ],
)
def test_central_keeps_the_aspect(size, image_size, fraction):
  """Both axes have the same scale and equal margins on both sides."""
  transform = EvalTransform(
    image_size, resize='central', central_fraction=fraction
  )
  # Source pixels per result pixel, determined by the smaller side.
  scale = fraction * min(size[0] / image_size[0], size[1] / image_size[1])
  starts = (np.array(size) - scale * np.array(image_size)) / 2
  # The resized sides and the offset are rounded to whole pixels, too.
  assert_sampled(transform, size, starts, (scale, scale), scale + 0.99)


def test_squash_central_resizes_and_cuts_the_centre():
  """Images are resized to 256 x 256, and the centre has 224 pixels."""
  image = smooth(96, 64)
  resized = cv2.resize(image, (256, 256), interpolation=cv2.INTER_LINEAR)
  transform = EvalTransform((224, 224), resize='squash_central')
  np.testing.assert_array_equal(
    transform.pixels(image), resized[16:240, 16:240]
  )


def test_interpolation_of_crops():
  """Training crops support the filters of evaluation."""
  image = noise(90, 70)
  for interpolation in INTERPOLATIONS:
    settings = dict(interpolation=interpolation)
    train = TrainTransform((32, 32), crop='none', flip=False, **settings)
    pixels = train.pixels(image, np.random.default_rng(0))
    expected = resize(image, 32, 32, interpolation)
    np.testing.assert_array_equal(pixels, expected)
    evaluate = EvalTransform((32, 32), **settings)
    np.testing.assert_array_equal(evaluate.pixels(image), expected)


def test_extreme_aspect_ratios_are_refused():
  """Enlarging the smaller side would require too much memory."""
  image = np.zeros((1, 10_000, 3), np.uint8)
  for transform in (
    EvalTransform((224, 224), resize='central'),
    TrainTransform((224, 224), crop='pad'),
  ):
    with pytest.raises(DecodeError, match='10000 x 1 pixels'):
      transform.pixels(image, np.random.default_rng(0))
  assert EvalTransform((224, 224)).pixels(image).shape == (224, 224, 3)


@pytest.mark.parametrize(
  'resize', ['squash', 'central', 'squash_central', 'torchvision']
)
@pytest.mark.parametrize('size', [(120, 200), (200, 90)])
def test_the_geometry_determines_the_sampled_pixels(resize, size):
  """The result samples the visible box of the image evenly."""
  transform = EvalTransform((48, 40), resize=resize, central_fraction=0.75)
  geometry = transform.geometry(*size)
  scales = np.divide(size, geometry.size)
  assert_sampled(transform, size, geometry.corner * scales, scales)
