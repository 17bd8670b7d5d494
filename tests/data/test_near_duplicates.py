"""Tests of perceptual hashes, and of the search for similar ones."""

import numpy as np
import pytest

from vit_jax.data import inspection


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
