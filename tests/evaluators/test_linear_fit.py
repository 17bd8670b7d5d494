"""Tests of the blocks in which linear probes read their examples."""

import numpy as np
import pytest

from vit_jax.evaluators import linear_fit
from vit_jax.evaluators.features import Labelled


@pytest.mark.parametrize('count', [0, 1, 4, 5, 8, 11])
def test_blocks_cover_every_row_once_and_in_order(count, monkeypatch):
  """The last block may be shorter."""
  monkeypatch.setattr(linear_fit, '_BLOCK', 4)
  blocks = [np.arange(count)[rows] for rows in linear_fit._blocks(count)]
  assert all(1 <= len(block) <= 4 for block in blocks)
  assert [row for block in blocks for row in block] == [*range(count)]


def test_sums_over_blocks_are_those_of_all_rows(monkeypatch):
  """Mean, standard deviation and accuracy use the rows of all blocks."""
  monkeypatch.setattr(linear_fit, '_BLOCK', 4)
  rng = np.random.default_rng(0)
  features = rng.normal(3.0, 2.0, (11, 3)).astype(np.float32)
  mean, scale = linear_fit.standardisation(features)
  wide = features.astype(np.float64)
  np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-12)
  np.testing.assert_allclose(scale, wide.std(0) + 1e-5, rtol=1e-12)
  classes = np.array([2, 5, 7])
  classifier = linear_fit.Classifier(
    np.zeros(3), np.ones(3), np.eye(3), np.zeros(3), classes
  )
  labels = classes[features.argmax(1)].astype(np.int32)
  labels[[0, 6, 10]] = 9  # one in each block
  found = classifier.accuracy(Labelled(features, labels))
  assert found == pytest.approx(8 / 11)
