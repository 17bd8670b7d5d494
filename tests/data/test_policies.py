"""Tests of policies: operations against Pillow, and their random draws."""

import collections
import colorsys
import functools

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from sample_images import noise

from vit_jax.data.augment import policies

# Operations


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


def pillow(function, image, *arguments, **options):
  return np.array(function(Image.fromarray(image), *arguments, **options))


@pytest.mark.parametrize('image', IMAGES.values(), ids=IMAGES)
def test_single_value_operations_equal_pillow(image):
  cases = [
    ('invert', 'invert'),
    ('auto_contrast', 'autocontrast'),
    ('equalize', 'equalize'),
    ('solarize', 'solarize'),
    *(('posterize', 'posterize', bits) for bits in range(1, 9)),
    *(('solarize', 'solarize', value) for value in (0, 1, 77, 255, 256)),
  ]
  for ours, theirs, *argument in cases:
    np.testing.assert_array_equal(
      getattr(policies, ours)(image, *argument),
      pillow(getattr(ImageOps, theirs), image, *argument),
      strict=True,
    )


@pytest.mark.parametrize('image', IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize('factor', [0.0, 0.1, 0.5, 1.0, 1.3, 1.9])
@pytest.mark.parametrize(
  'name', ['brightness', 'contrast', 'color', 'sharpness']
)
def test_enhancements_are_close_to_pillow(image, factor, name):
  """Results differ by up to two levels: Pillow truncates, OpenCV rounds."""
  enhancer = getattr(ImageEnhance, name.capitalize())
  expected = pillow(lambda x: enhancer(x).enhance(factor), image).astype(int)
  ours = getattr(policies, name)(image, factor)
  assert np.abs(ours - expected).max() <= (0 if factor == 1 else 2)


def test_other_operations_on_colours():
  """Pillow's luma differs by at most one level; it blurs by boxes instead."""
  image = photograph()
  assert not policies.posterize(image, 0).any()
  expected = np.where(image < 128, np.minimum(image + 110.0, 255), image)
  np.testing.assert_array_equal(policies.solarize_add(image, 110), expected)
  expected = pillow(lambda x: x.convert('L').convert('RGB'), image).astype(int)
  assert np.abs(policies.greyscale(image) - expected).max() <= 1
  for sigma in (0.1, 0.5, 1.0, 2.0):
    gaussian = ImageFilter.GaussianBlur(sigma)
    expected = pillow(Image.Image.filter, image, gaussian).astype(int)
    assert np.abs(policies.blur(image, sigma) - expected).mean() < 0.5


def by_pillow(image, name, amount, resample, fill):
  """Returns what Pillow makes of a geometric operation."""
  options = dict(resample=resample, fillcolor=fill)
  if name == 'rotate':
    return pillow(Image.Image.rotate, image, amount, **options)
  matrix = {
    'shear_x': (1, amount, 0, 0, 1, 0),
    'shear_y': (1, 0, 0, amount, 1, 0),
    'translate_x': (1, 0, amount, 0, 1, 0),
    'translate_y': (1, 0, 0, 0, 1, amount),
  }[name]
  size, method = image.shape[1::-1], Image.Transform.AFFINE
  return pillow(Image.Image.transform, image, size, method, matrix, **options)


LARGEST = dict(
  rotate=30, shear_x=0.3, shear_y=0.3, translate_x=20, translate_y=20
)


@pytest.mark.parametrize('share', [-1.0, -0.4, 0.0, 0.7, 1.0])
@pytest.mark.parametrize('name', LARGEST)
def test_geometry_operations_equal_pillow(name, share):
  """OpenCV's weights of 1/32 differ by at most two levels.

  Results differ at the seam to the outside, which Pillow blends less. Pillow's
  bicubic filter is called with the same matrix; it rounds that of a rotation.
  """
  image, amount = photograph(), LARGEST[name] * share
  grey, mean = (128, 128, 128), (124, 116, 104)
  expected = by_pillow(image, name, amount, Image.Resampling.BILINEAR, grey)
  ours = getattr(policies, name)(image, amount)
  close = np.abs(ours - expected.astype(int)).max(axis=2) <= 2
  assert close.mean() > 0.97
  expected = by_pillow(image, name, amount, Image.Resampling.BICUBIC, mean)
  ours = getattr(policies, name)(image, amount, bicubic=True, fill=mean)
  if name == 'rotate':
    assert np.mean(np.abs(ours - expected.astype(int)) > 1) < 0.01
  else:
    np.testing.assert_array_equal(ours, expected)


# Random draws


IMAGE = noise(20, 30)
NAMES = {
  'auto_contrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize',
  'solarize_add', 'color', 'contrast', 'brightness', 'sharpness', 'shear_x',
  'shear_y', 'translate_x', 'translate_y',
}  # fmt: skip


def both(operation, argument, **options):
  return [operation(IMAGE, sign * argument, **options) for sign in (1, -1)]


TIMMS = dict(bicubic=True, fill=(124, 116, 104))


# (policy, operation, level, possible results of equal probability)
MEANINGS = [
  ('timm', 'rotate', 0.5, both(policies.rotate, 15, **TIMMS)),
  ('timm', 'shear_x', 1.0, both(policies.shear_x, 0.3, **TIMMS)),
  ('timm', 'translate_x', 1.0, both(policies.translate_x, 13.5, **TIMMS)),
  ('timm', 'translate_y', 1.0, both(policies.translate_y, 9, **TIMMS)),
  ('timm', 'color', 0.5, [policies.color(IMAGE, f) for f in (1.45, 0.55)]),
  ('timm', 'contrast', 1.0, [policies.contrast(IMAGE, f) for f in (1.9, 0.1)]),
  ('timm', 'posterize', 0.9, [policies.posterize(IMAGE, 1)]),
  ('timm', 'solarize', 0.25, [policies.solarize(IMAGE, 192)]),
  ('timm', 'solarize_add', 0.5, [policies.solarize_add(IMAGE, 55)]),
  ('authors', 'rotate', 1.0, both(policies.rotate, 30)),
  ('authors', 'translate_y', 0.1, both(policies.translate_y, 20 * 10 / 224)),
  ('authors', 'brightness', 0.0, [policies.brightness(IMAGE, 0.1)]),
  ('authors', 'brightness', 1.0, [policies.brightness(IMAGE, 1.9)]),
  ('authors', 'posterize', 0.5, [policies.posterize(IMAGE, 2)]),
  ('authors', 'solarize', 1.0, [IMAGE]),
  ('authors', 'solarize', 2.0, [IMAGE]),  # weaker beyond 10
  ('authors', 'posterize', 1.5, [policies.posterize(IMAGE, 6)]),
  ('authors', 'posterize', 2.7, [IMAGE]),
  ('authors', 'rotate', 1.5, both(policies.rotate, 45)),
]


@pytest.mark.parametrize('policy, name, level, results', MEANINGS)
def test_levels_have_the_meaning_in_timms_or_the_authors_code(
  policy, name, level, results
):
  rng, operation = np.random.default_rng(0), policies.POLICIES[policy][name]
  counts = [0] * len(results)
  for _ in range(60):
    changed = operation(IMAGE, level, rng)
    same = [np.array_equal(changed, result) for result in results]
    assert sum(same) == 1
    counts[same.index(True)] += 1
  assert min(counts) >= 60 / len(results) - 5 * np.sqrt(15)


def test_authors_policy_at_224_pixels_has_the_numbers_of_their_code():
  image, rng = noise(224, 224), np.random.default_rng(0)
  moved = policies.AUTHORS['translate_x'](image, 1.0, rng)
  assert any(
    np.array_equal(moved, policies.translate_x(image, sign * 100))
    for sign in (1, -1)
  )
  white = np.full((224, 224, 3), 255, np.uint8)
  cut = [policies.AUTHORS['cut_out'](white, 1.0, rng) for _ in range(50)]
  assert max((c == 128).all(-1).sum() for c in cut) == 80 * 80


@pytest.fixture
def calls(monkeypatch):
  """Replaces the operations; returns the levels of all calls, by name."""
  levels = collections.defaultdict(list)

  def record(name, image, level, rng):
    levels[name].append(level)
    return image

  for table in policies.POLICIES.values():
    for name in table:
      operation = functools.partial(record, name)
      monkeypatch.setitem(table, name, operation)
  return levels


def test_authors_policy_applies_all_drawn_operations(calls):
  """N operations per image are drawn uniformly, all at magnitude M."""
  rng = np.random.default_rng(0)
  for _ in range(800):
    policies.rand_augment(IMAGE, 2, 7.0, 'authors', rng)
  assert calls.keys() == NAMES | {'cut_out'}
  assert {level for levels in calls.values() for level in levels} == {0.7}
  counts = np.array([*map(len, calls.values())])
  assert counts.sum() == 1600 and np.abs(counts - 100).max() < 5 * 10


def test_timm_policy_applies_half_of_the_operations(calls):
  """Each has probability 1/2, and the std of its magnitude is .5."""
  rng = np.random.default_rng(0)
  for _ in range(1000):
    policies.rand_augment(IMAGE, 2, 5.0, 'timm', rng)
  assert calls.keys() == NAMES
  levels = np.concatenate([*calls.values()])
  assert len(levels) == pytest.approx(1000, abs=5 * np.sqrt(500))
  assert levels.mean() == pytest.approx(0.5, abs=0.01)
  assert levels.std() == pytest.approx(0.05, abs=0.005)


def test_three_augment_applies_one_of_three():
  """Greyscale, solarization and blur have probability 1/3 each."""
  rng, counts = np.random.default_rng(0), collections.Counter()
  grey, solar = policies.greyscale(IMAGE), policies.solarize(IMAGE)
  for _ in range(600):
    changed = policies.three_augment(IMAGE, rng)
    is_grey, is_solar = (np.array_equal(changed, x) for x in (grey, solar))
    counts[is_grey, is_solar] += 1
    assert is_grey or is_solar or changed.std() <= IMAGE.std()
  assert len(counts) == 3
  assert min(counts.values()) > 200 - 5 * np.sqrt(133)


class Chosen(np.random.Generator):
  """Returns given numbers, in order, and records the ranges of the draws."""

  def __init__(self, numbers):
    super().__init__(np.random.PCG64(0))
    self.numbers, self.ranges = [*numbers], []

  def random(self):
    return self.numbers.pop(0)

  def uniform(self, *limits):
    self.ranges.append(limits)
    return self.numbers.pop(0)

  integers = uniform


def in_hsv(image, saturation, hue):
  """Changes saturation (by a factor) and hue (by steps of two degrees)."""
  changed = []
  for pixel in image.reshape(-1, 3) / 255:
    h, s, v = colorsys.rgb_to_hsv(*pixel)
    factors = (h + hue / 180) % 1, min(s * saturation, 1), v
    changed.append(colorsys.hsv_to_rgb(*factors))
  return 255 * np.array(changed).reshape(image.shape)


# Brightness and hue change if the number before is below .5, contrast and
# saturation if it is above. The second of these numbers is the order.
CONTRAST_FIRST = 0.1, 20.5, 0.1, 0.9, 1.3, 0.9, 0.6, 0.1, -7
CONTRAST_LAST = 0.1, 20.5, 0.9, 0.9, 0.6, 0.1, -7, 0.9, 1.3


@pytest.mark.parametrize('numbers', [CONTRAST_FIRST, CONTRAST_LAST])
def test_photometric_distortion(numbers):
  """The contrast changes before or after saturation and hue."""
  rng = Chosen(numbers)
  found = policies.photometric_distortion(IMAGE, rng)
  expected, factors = (IMAGE + 20.5).clip(0, 255), [1.3, 1]
  before, after = factors if numbers == CONTRAST_FIRST else factors[::-1]
  expected = in_hsv((expected * before).clip(0, 255), 0.6, -7)
  expected = (expected * after).clip(0, 255)
  # Hue and saturation are rounded to 180 and 256 steps.
  assert np.abs(found - expected).mean() < 2
  assert np.abs(found - expected).max() < 12
  assert sorted(rng.ranges) == [(-32, 32), (-18, 18), (0.5, 1.5), (0.5, 1.5)]
  assert not rng.numbers


def test_photometric_distortion_changes_half_of_the_images():
  """Each of four changes has probability .5; a grey image has no hue."""
  grey = np.full((1, 1, 3), 128, np.uint8)
  rng = np.random.default_rng(0)
  results = [policies.photometric_distortion(grey, rng) for _ in range(2000)]
  same = np.mean([(each == 128).all() for each in results])
  assert same == pytest.approx(1 / 4, abs=0.04)
