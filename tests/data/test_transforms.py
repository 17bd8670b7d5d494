"""Tests of training crops against closed forms of the geometry."""

import numpy as np
import pytest
from sample_images import coordinates, encode, smooth

from vit_jax.data.augment.transforms import TrainTransform

# Training crops

AREAS = dict(min_area=0.2, max_area=0.7, min_aspect=0.6, max_aspect=1.5)


@pytest.mark.parametrize(
  'height, width', [(300, 400), (400, 300), (64, 64), (500, 353)]
)
@pytest.mark.parametrize('ranges', [dict(), AREAS])
def test_inception_boxes_are_in_their_ranges(height, width, ranges):
  """Area and aspect ratio are in range, and the box is inside the image."""
  transform = TrainTransform((8, 8), **ranges)
  rng = np.random.default_rng(0)
  area = height * width
  whole = shares = 0
  for _ in range(2000):
    y, x, h, w = transform._inception_box(height, width, rng)
    assert 0 <= y <= y + h <= height and 0 <= x <= x + w <= width
    if (h, w) == (height, width) and transform.max_area < 1:
      whole += 1  # ten draws failed
      continue
    assert transform.min_area <= h * w / area <= transform.max_area
    # The width is rounded, so it differs by up to half a pixel.
    assert w + 0.5 >= transform.min_aspect * h
    assert w - 0.5 <= transform.max_aspect * h
    shares += h * w / area
  assert whole < 20


def test_the_crop_equals_the_box():
  """The crop is the box of `_inception_box` before resizing."""
  image = coordinates(60, 80)
  transform = TrainTransform((1, 1), flip=False)
  for seed in range(20):
    box = transform._inception_box(60, 80, np.random.default_rng(seed))
    y, x, h, w = box
    same_size = TrainTransform((h, w), flip=False)
    cut = same_size.pixels(image, np.random.default_rng(seed))
    np.testing.assert_array_equal(cut, image[y : y + h, x : x + w])


def test_flip_mirrors_half_of_the_time():
  """Half of the draws are mirrored, and none with flip=False."""
  image, rng = coordinates(8, 8), np.random.default_rng(0)
  transform = TrainTransform((8, 8), crop='none')
  flipped = 0
  for _ in range(1000):
    pixels = transform.pixels(image, rng)
    if np.array_equal(pixels, image[:, ::-1]):
      flipped += 1
    else:
      np.testing.assert_array_equal(pixels, image)
  assert flipped == pytest.approx(500, abs=5 * np.sqrt(250))
  still = TrainTransform((8, 8), crop='none', flip=False)
  for _ in range(20):
    np.testing.assert_array_equal(still.pixels(image, rng), image)


def test_a_padded_crop_covers_the_border():
  """Crops of an image of the same size have all offsets, with reflection."""
  image, rng = coordinates(32, 32), np.random.default_rng(0)
  transform = TrainTransform((32, 32), crop='pad', pad=4, flip=False)
  offsets = set()
  for _ in range(1000):
    pixels = transform.pixels(image, rng)
    y, x = np.argwhere((pixels[:, :, 0] == 15) & (pixels[:, :, 1] == 15))[0]
    offsets.add((15 - y, 15 - x))
    rows = 31 - np.abs(31 - np.abs(np.arange(32) + 15 - y))
    columns = 31 - np.abs(31 - np.abs(np.arange(32) + 15 - x))
    np.testing.assert_array_equal(pixels[:, 0, 0], rows)
    np.testing.assert_array_equal(pixels[0, :, 1], columns)
  assert {y for y, _ in offsets} == {x for _, x in offsets} == set(range(-4, 5))


@pytest.mark.parametrize(
  'settings',
  [
    dict(randaugment_layers=2),
    dict(randaugment_layers=2, randaugment_policy='authors'),
    dict(three_augment=True),
    dict(color_jitter=0.3),
    dict(crop='pad', three_augment=True, color_jitter=0.3),
  ],
)
def test_colours_are_changed_after_cropping(settings):
  """Crop and flip are the same with and without colour operations."""
  image, changed = encode(smooth(60, 50), '.png'), 0
  plain = TrainTransform((24, 24), crop=settings.get('crop', 'inception'))
  transform = TrainTransform((24, 24), **settings)
  for seed in range(20):
    pixels = transform.pixels(image, np.random.default_rng(seed))
    again = transform.pixels(image, np.random.default_rng(seed))
    np.testing.assert_array_equal(pixels, again)
    assert pixels.shape == (24, 24, 3) and pixels.dtype == np.uint8
    without = plain.pixels(image, np.random.default_rng(seed))
    changed += not np.array_equal(pixels, without)
  assert 10 < changed <= 20
  every = dict(randaugment_layers=0, three_augment=False, color_jitter=0.0)
  off = TrainTransform((24, 24), **settings | every)
  np.testing.assert_array_equal(
    off.pixels(image, np.random.default_rng(3)),
    plain.pixels(image, np.random.default_rng(3)),
  )
