"""Tests of crops and resizing against closed forms."""

import cv2
import numpy as np
import pytest
from sample_images import coordinates, encode, noise, smooth

from vit_jax.data.augment import transforms
from vit_jax.data.augment.transforms import EvalTransform, TrainTransform
from vit_jax.data.images.decode import INTERPOLATIONS, resize
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError

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
  boxes = [transform._inception_box(height, width, rng) for _ in range(2000)]
  y, x, h, w = np.array(boxes).T
  assert min(y.min(), x.min()) >= 0
  assert (y + h <= height).all() and (x + w <= width).all()
  # The whole image is the result of ten draws that failed.
  drawn = (h != height) | (w != width) | (transform.max_area == 1)
  assert drawn.sum() > 1980
  y, x, h, w = (each[drawn] for each in (y, x, h, w))
  area = h * w / (height * width)
  assert transform.min_area <= area.min() <= area.max() <= transform.max_area
  # The width is rounded, so it differs by up to half a pixel.
  assert (w + 0.5 >= transform.min_aspect * h).all()
  assert (w - 0.5 <= transform.max_aspect * h).all()


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


@pytest.mark.parametrize('flip, expected', [(True, 500), (False, 0)])
def test_flip_mirrors_half_of_the_time(flip, expected):
  image, rng = coordinates(8, 8), np.random.default_rng(0)
  transform = TrainTransform((8, 8), crop='none', flip=flip)
  images = [transform.pixels(image, rng) for _ in range(1000)]
  flipped = [np.array_equal(each, image[:, ::-1]) for each in images]
  same = [np.array_equal(each, image) for each in images]
  assert sum(flipped) + sum(same) == 1000
  assert sum(flipped) == pytest.approx(expected, rel=0.01 * np.sqrt(250))


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
  """Crop and flip are the same without colour operations."""
  image, changed = encode(smooth(60, 50), '.png'), 0
  transform = TrainTransform((24, 24), **settings)
  crop = settings.get('crop', 'inception')
  plain = TrainTransform((24, 24), crop=crop)
  for seed in range(20):
    pixels, again, without = (
      each.pixels(image, np.random.default_rng(seed))
      for each in (transform, transform, plain)
    )
    np.testing.assert_array_equal(pixels, again)
    assert pixels.shape == (24, 24, 3) and pixels.dtype == np.uint8
    changed += not np.array_equal(pixels, without)
    assert transform.geometry(60, 50, np.random.default_rng(seed)) == (
      plain.geometry(60, 50, np.random.default_rng(seed))
    )
  assert 10 < changed <= 20


@pytest.mark.parametrize(
  'key, value',
  [('randaugment_layers', 2), ('three_augment', True), ('color_jitter', 0.3)],
)
@pytest.mark.parametrize('kind', [dict(channels=4), dict(bits=16)])
def test_operations_on_colours_are_refused(key, value, kind):
  (other,) = kind
  with pytest.raises(UserError, match=rf'augment\.{key}.*augment\.{other}'):
    TrainTransform((8, 8), **{key: value}, **kind)
  TrainTransform((8, 8), **{key: value})


# Evaluation


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
  'resize, size, image_size, fraction',
  [
    ('squash', (100, 200), (50, 50), 0.875),
    ('squash', (200, 100), (33, 77), 0.875),
    ('squash', (40, 30), (80, 90), 0.875),
    ('squash', (17, 256), (16, 16), 0.875),
    ('central', (192, 256), (112, 112), 0.875),
    ('central', (256, 192), (112, 112), 0.875),
    ('central', (200, 200), (50, 100), 0.875),
    ('central', (100, 240), (60, 40), 1.0),
    ('central', (64, 48), (96, 96), 0.5),
  ],
)
def test_squash_scales_each_axis_and_central_keeps_the_aspect(
  resize, size, image_size, fraction
):
  """'squash' uses the whole image, and 'central' has equal margins."""
  transform = EvalTransform(
    image_size, resize=resize, central_fraction=fraction
  )
  scales, tolerance = np.divide(size, image_size), 0.99
  if resize == 'central':  # the smaller side determines both
    scales = np.full(2, fraction * scales.min())
    tolerance += scales[0]  # sizes and the offset are whole pixels
  starts = (np.array(size) - scales * image_size) / 2
  assert_sampled(transform, size, starts, scales, tolerance)


def test_squash_central_resizes_and_cuts_the_centre():
  """Images are resized to 256 x 256, and the centre has 224 pixels."""
  image = smooth(96, 64)
  resized = cv2.resize(image, (256, 256), interpolation=cv2.INTER_LINEAR)
  transform = EvalTransform((224, 224), resize='squash_central')
  np.testing.assert_array_equal(
    transform.pixels(image), resized[16:240, 16:240]
  )


@pytest.mark.parametrize('interpolation', INTERPOLATIONS)
def test_training_and_evaluation_have_the_same_filters(interpolation):
  image, keys = noise(90, 70), dict(interpolation=interpolation)
  expected = resize(image, 32, 32, interpolation)
  train = TrainTransform((32, 32), crop='none', flip=False, **keys)
  for transform in (train, EvalTransform((32, 32), **keys)):
    pixels = transform.pixels(image, np.random.default_rng(0))
    np.testing.assert_array_equal(pixels, expected)


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


# Sizes of resized images, and random boxes; the numbers are torchvision's.

# (height, width) of images after torchvision's Resize(256), computed with
# torchvision 0.28. The exact longer side is in the comment.
RESIZED_256 = {
  (375, 500): (256, 341),  # 341.33
  (500, 375): (341, 256),
  (480, 641): (256, 341),  # 341.87
  (707, 455): (397, 256),  # 397.78
  (449, 449): (256, 256),
  (100, 199): (256, 509),  # 509.44
  (3, 2): (384, 256),
  (767, 766): (256, 256),  # 256.33
}


@pytest.mark.parametrize('centre', [(224, 224), (96, 224), (224, 96)])
@pytest.mark.parametrize('size', RESIZED_256)
def test_the_longer_side_is_rounded_down(size, centre):
  """The shorter side is 256 pixels for a centre of up to 224."""
  found = transforms.shorter_side_size(*size, centre, 224 / 256)
  assert found == RESIZED_256[size]


def test_the_shorter_side_is_the_quotient_of_whole_numbers():
  """A fraction that was computed from two sides gives the second one again.

  In floating point, the quotient may be slightly below a whole number.
  """
  for side in range(1, 400):
    for resized in (side, side + 1, side + 25, 2 * side):
      fraction = side / resized
      found = transforms.shorter_side_size(90, 90, (side, side), fraction)
      assert found == (resized, resized)


def test_boxes_that_do_not_fit_are_replaced_by_the_centre():
  """Ten pairs of area and aspect ratio are drawn before."""
  rng, other = np.random.default_rng(0), np.random.default_rng(0)
  box = transforms.random_box(10, 1000, (1.0, 1.0), rng)
  assert box == (0, 493, 10, 13)
  other.uniform(size=2 * 10)
  assert rng.random() == other.random()


def test_boxes_have_all_positions():
  """A box of 2x2 pixels has nine positions in an image of 4x4 pixels."""
  rng = np.random.default_rng(0)
  boxes = {
    transforms.random_box(4, 4, (0.25, 0.25), rng, (1.0, 1.0))
    for _ in range(300)
  }
  assert boxes == {(y, x, 2, 2) for y in range(3) for x in range(3)}
