"""Balance: as many of each class, the most confident, copies where short."""

import collections

import numpy as np
import pytest

from vit_jax.pseudo_label.choice import balanced

SIZES = {0: 40, 1: 3, 2: 7, 4: 1}  # of class 3 there is none
PER_CLASS = 7


def drawn():
  """Labels in no order, and confidences of which many are equal."""
  rng = np.random.default_rng(0)
  labels = rng.permutation(np.repeat([*SIZES], [*SIZES.values()]))
  confidence = rng.integers(30, 36, len(labels)) / 100
  return labels, confidence.astype(np.float32)


def test_balance():
  """Every class has exactly so many, whatever it had."""
  labels, confidence = drawn()
  found = balanced(labels, confidence, PER_CLASS, seed=0)
  assert (np.diff(found.rows) > 0).all() and (found.copies > 0).all()
  sums = collections.Counter()
  for row, copies in zip(found.rows, found.copies, strict=True):
    sums[int(labels[row])] += int(copies)
  assert sums == dict.fromkeys(SIZES, PER_CLASS)


def test_large_classes_keep_their_most_confident():
  """By a plain sort of (confidence, place); equal ones by place."""
  labels, confidence = drawn()
  found = balanced(labels, confidence, PER_CLASS, seed=0)
  ranked = sorted(
    (-float(c), place)
    for place, (k, c) in enumerate(zip(labels, confidence, strict=True))
    if k == 0
  )
  expected = sorted(place for _, place in ranked[:PER_CLASS])
  of_class = labels[found.rows] == 0
  assert found.rows[of_class].tolist() == expected
  assert (found.copies[of_class] == 1).all()
  assert ranked[PER_CLASS - 1][0] == ranked[PER_CLASS][0]  # there was a tie


def test_small_classes_are_copied_evenly():
  """7 of 3 are 2, 2 and 3 copies: which has 3 is drawn; 7 of 1 are 7."""
  labels, confidence = drawn()
  most = set()
  for seed in range(20):
    found = balanced(labels, confidence, PER_CLASS, seed)
    copies = {k: found.copies[labels[found.rows] == k] for k in SIZES}
    assert sorted(copies[1]) == [2, 2, 3] and copies[4].tolist() == [7]
    assert copies[2].tolist() == [1] * 7
    most.add(int(copies[1].argmax()))
    again = balanced(labels, confidence, PER_CLASS, seed)
    np.testing.assert_array_equal(found.copies, again.copies)
  assert most == {0, 1, 2}


@pytest.mark.parametrize('per_class', [0, 1])
def test_without_balance_and_with_the_least(per_class):
  """0 keeps everything once."""
  labels, confidence = drawn()
  found = balanced(labels, confidence, per_class, seed=0)
  assert len(found.rows) == (len(SIZES) if per_class else len(labels))
  assert (found.copies == 1).all()
