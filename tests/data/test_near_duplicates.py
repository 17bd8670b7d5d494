"""Tests of perceptual hashes, and of the search for similar ones."""

import cv2
import numpy as np
import pytest

from vit_jax.data import inspection
from vit_jax.data.images.decode import decode


def photograph(number, height=90, width=120):
  """Returns smooth random pixels, which have structure at every scale."""
  rng = np.random.default_rng(number)
  pixels = np.zeros((height, width, 3))
  for side in (3, 6, 12, 24):
    noise = rng.normal(size=(side, side, 3)) / side**0.5
    pixels += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
  pixels -= pixels.min()
  return (pixels * 255 / pixels.max()).astype(np.uint8)


def jpeg(pixels, quality):
  options = [cv2.IMWRITE_JPEG_QUALITY, quality]
  bgr = np.ascontiguousarray(pixels[..., ::-1])
  return decode(cv2.imencode('.jpg', bgr, options)[1].tobytes())


def resized(pixels, height, width):
  return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


def distance(first, second):
  hashes = map(inspection.perceptual_hash, (first, second))
  return np.bitwise_xor(*map(np.uint64, hashes)).item().bit_count()


@pytest.mark.parametrize(
  'copied',
  [
    lambda pixels: jpeg(pixels, 50),
    lambda pixels: resized(pixels, 60, 80),
    lambda pixels: resized(pixels, 64, 64),
    lambda pixels: np.clip(pixels * 0.8 + 10, 0, 255).astype(np.uint8),
  ],
  ids=['compressed', 'smaller', 'squashed', 'darker'],
)
def test_hashes_of_copies_are_similar(copied):
  for number in range(10):
    pixels = photograph(number)
    found = distance(pixels, np.ascontiguousarray(copied(pixels)))
    assert found <= inspection.MAX_DISTANCE


def test_hashes_of_other_images_are_not_similar():
  """Mirrored images are other images."""
  images = [photograph(number) for number in range(20)]
  for number, pixels in enumerate(images):
    for other in [pixels[:, ::-1].copy(), *images[:number]]:
      assert distance(pixels, other) > inspection.MAX_DISTANCE


def changed(rng, value, count):
  """Returns a hash of which `count` random bits differ."""
  bits = rng.choice(64, count, replace=False)
  return value ^ np.bitwise_or.reduce(np.uint64(1) << bits.astype(np.uint64))


@pytest.mark.parametrize('max_distance', [0, 1, 4, 11])
def test_nearest_agrees_with_comparing_all_pairs(max_distance, monkeypatch):
  """The first of the references with the smallest distance is found."""
  monkeypatch.setattr(inspection, '_PAIRS', 50)  # several chunks
  rng = np.random.default_rng(max_distance)
  references = rng.integers(0, 2**64, 300, np.uint64)
  references[7] = references[200]
  near = [changed(rng, references[i], i % 14) for i in range(1, 300, 3)]
  near += [references[7], changed(rng, references[200], max_distance)]
  hashes = np.array([*near, *rng.integers(0, 2**64, 200, np.uint64), near[0]])
  rows, distances = inspection.nearest(hashes, references, max_distance)
  every = np.bitwise_count(hashes[:, None] ^ references).astype(int)
  best, first = every.min(axis=1), every.argmin(axis=1)
  expected = np.where(best <= max_distance, first, -1)
  np.testing.assert_array_equal(rows, expected)
  np.testing.assert_array_equal(
    distances, np.where(best <= max_distance, best, -1)
  )
  assert 5 < (rows < 0).sum() < len(rows) - 5
