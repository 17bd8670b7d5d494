"""Tests of the random draws of augmentation policies."""

import collections
import colorsys

import numpy as np
import pytest
from sample_images import noise

from vit_jax.data.augment import policies

IMAGE = noise(20, 30)
NAMES = {
  'auto_contrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize',
  'solarize_add', 'color', 'contrast', 'brightness', 'sharpness', 'shear_x',
  'shear_y', 'translate_x', 'translate_y',
}  # fmt: skip


class Recorder:
  """Replaces the operations and records the arguments of their calls."""

  def __init__(self, monkeypatch):
    self.calls = collections.defaultdict(list)
    for table in policies.POLICIES.values():
      for name in table:
        monkeypatch.setitem(table, name, self.operation(name))

  def operation(self, name):
    def record(image, level, rng):
      self.calls[name].append(level)
      return image

    return record

  def levels(self):
    return np.concatenate([np.array(v) for v in self.calls.values()])


def test_policies_have_the_published_operations():
  """timm has 15 operations, and the authors' policy has 16."""
  assert policies.TIMM.keys() == NAMES
  assert policies.AUTHORS.keys() == NAMES | {'cut_out'}


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
def test_levels_have_the_published_meaning(policy, name, level, results):
  """Arguments at a level are those of timm's or the authors' code."""
  rng, operation = np.random.default_rng(0), policies.POLICIES[policy][name]
  counts = [0] * len(results)
  for _ in range(60):
    changed = operation(IMAGE, level, rng)
    same = [np.array_equal(changed, result) for result in results]
    assert sum(same) == 1
    counts[same.index(True)] += 1
  assert min(counts) >= 60 / len(results) - 5 * np.sqrt(15)


def test_authors_policy_at_224_pixels():
  """The numbers are those of the authors' code."""
  image, rng = noise(224, 224), np.random.default_rng(0)
  moved = policies.AUTHORS['translate_x'](image, 1.0, rng)
  assert any(
    np.array_equal(moved, policies.translate_x(image, sign * 100))
    for sign in (1, -1)
  )
  white = np.full((224, 224, 3), 255, np.uint8)
  cut = [policies.AUTHORS['cut_out'](white, 1.0, rng) for _ in range(50)]
  assert max((c == 128).all(-1).sum() for c in cut) == 80 * 80


def test_authors_policy_applies_all_drawn_operations(monkeypatch):
  """N operations per image are drawn uniformly, all at magnitude M."""
  recorder, rng = Recorder(monkeypatch), np.random.default_rng(0)
  for _ in range(800):
    policies.rand_augment(IMAGE, 2, 7.0, 'authors', rng)
  assert (recorder.levels() == 0.7).all()
  counts = [len(calls) for calls in recorder.calls.values()]
  assert sum(counts) == 1600 and len(counts) == 16
  assert np.abs(np.array(counts) - 100).max() < 5 * 10


def test_timm_policy_applies_half_of_the_operations(monkeypatch):
  """Each has probability 1/2, and the std of its magnitude is .5."""
  recorder, rng = Recorder(monkeypatch), np.random.default_rng(0)
  for _ in range(1000):
    policies.rand_augment(IMAGE, 2, 5.0, 'timm', rng)
  levels = recorder.levels()
  assert len(levels) == pytest.approx(1000, abs=5 * np.sqrt(500))
  assert levels.mean() == pytest.approx(0.5, abs=0.01)
  assert levels.std() == pytest.approx(0.05, abs=0.005)


def test_three_augment_applies_one_of_three():
  """Greyscale, solarization and blur have probability 1/3 each."""
  rng, counts = np.random.default_rng(0), collections.Counter()
  grey, solar = policies.greyscale(IMAGE), policies.solarize(IMAGE)
  for _ in range(600):
    changed = policies.three_augment(IMAGE, rng)
    if np.array_equal(changed, grey):
      counts['grey'] += 1
    elif np.array_equal(changed, solar):
      counts['solar'] += 1
    else:
      counts['blur'] += 1
      assert changed.std() <= IMAGE.std()
  assert len(counts) == 3
  assert min(counts.values()) > 200 - 5 * np.sqrt(133)


class Chosen(np.random.Generator):
  """Returns given values, in order, and checks the ranges of the draws."""

  def __init__(self, **values):
    super().__init__(np.random.PCG64(0))
    self._values = {name: [*each] for name, each in values.items()}
    self.ranges = []

  def random(self):
    return self._values['random'].pop(0)

  def uniform(self, *given):
    self.ranges.append(given)
    return self._values['uniform'].pop(0)

  def integers(self, *given):
    self.ranges.append(given)
    return self._values['integers'].pop(0)


def in_hsv(image, saturation, hue):
  """Changes saturation (by a factor) and hue (by steps of two degrees)."""
  changed = []
  for pixel in image.reshape(-1, 3) / 255:
    h, s, v = colorsys.rgb_to_hsv(*pixel)
    factors = (h + hue / 180) % 1, min(s * saturation, 1), v
    changed.append(colorsys.hsv_to_rgb(*factors))
  return 255 * np.array(changed).reshape(image.shape)


@pytest.mark.parametrize('first', [True, False])
def test_photometric_distortion(first):
  """The contrast changes before or after saturation and hue."""
  distort = policies.photometric_distortion
  yes, no = 0.9, 0.1
  # Brightness and hue change below .5, contrast and saturation above.
  draws = [no, no, yes, yes, no] if first else [no, yes, yes, no, yes]
  factors = (20.5, 1.3, 0.6) if first else (20.5, 0.6, 1.3)
  rng = Chosen(random=draws, uniform=factors, integers=[-7])
  found = distort(IMAGE, rng)
  expected = (IMAGE + 20.5).clip(0, 255)
  expected = (expected * 1.3).clip(0, 255) if first else expected
  expected = in_hsv(expected, 0.6, -7)
  expected = expected if first else (expected * 1.3).clip(0, 255)
  # Hue and saturation are rounded to 180 and 256 steps.
  assert np.abs(found - expected).mean() < 2
  assert np.abs(found - expected).max() < 12
  assert sorted(rng.ranges) == [(-32, 32), (-18, 18), (0.5, 1.5), (0.5, 1.5)]


def test_photometric_distortion_changes_half_of_the_images():
  """Each of four changes has probability .5; a grey image has no hue."""
  grey = np.full((1, 1, 3), 128, np.uint8)
  rng = np.random.default_rng(0)
  results = [policies.photometric_distortion(grey, rng) for _ in range(2000)]
  same = np.mean([(each == 128).all() for each in results])
  assert same == pytest.approx(1 / 4, abs=0.04)
