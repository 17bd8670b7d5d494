"""Tests of the search for similar perceptual hashes."""

import numpy as np
import pytest

from vit_jax.data import inspection


def changed(rng, value, count):
  """Returns a hash of which `count` random bits differ."""
  bits = rng.choice(64, count, replace=False)
  return value ^ np.bitwise_or.reduce(np.uint64(1) << bits.astype(np.uint64))


@pytest.mark.parametrize('max_distance', [0, 4, 11])
@pytest.mark.parametrize('pairs', [10, 2000])
def test_nearest_is_the_first_with_the_fewest_different_bits(
  max_distance, pairs, monkeypatch
):
  """The reference computes each distance from the digits of both hashes."""
  monkeypatch.setattr(inspection, '_PAIRS', pairs)  # several chunks
  rng = np.random.default_rng(max_distance)
  references = rng.integers(0, 2**64, 100, np.uint64)
  references[7] = references[80]
  near = [changed(rng, references[i % 100], i % 14) for i in range(0, 130, 3)]
  near += [references[7], changed(rng, references[80], max_distance)]
  hashes = np.array([*near, *rng.integers(0, 2**64, 50, np.uint64), near[0]])
  rows, distances = inspection.nearest(hashes, references, max_distance)
  for value, row, distance in zip(hashes, rows, distances, strict=True):
    each = [f'{int(value) ^ int(x):b}'.count('1') for x in references]
    close = min(each) <= max_distance
    expected = (each.index(min(each)), min(each)) if close else (-1, -1)
    assert (row, distance) == expected
  assert 5 < (rows < 0).sum() < len(rows) - 5


def test_a_split_without_usable_images_has_no_copies():
  found = {
    name: inspection.Found(
      np.zeros(count, inspection._ROW), np.zeros((2, 3)), []
    )
    for name, count in (('train', 0), ('test', 3))
  }
  assert not list(inspection.copies(found, 'train', 'test', 4))
