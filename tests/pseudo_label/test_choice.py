"""Tests of the balanced selection of confident examples."""

import numpy as np

from vit_jax.pseudo_label import balanced

SIZES = {0: 40, 1: 3, 2: 7, 4: 1}  # class 3 has no examples
PER_CLASS = 7


def drawn():
  """Returns labels in random order, and confidences with many ties."""
  rng = np.random.default_rng(0)
  labels = rng.permutation(np.repeat([*SIZES], [*SIZES.values()]))
  confidence = rng.integers(30, 36, len(labels)) / 100
  return labels, confidence.astype(np.float32)


def test_large_classes_keep_their_most_confident():
  """The reference sorts by (confidence, index)."""
  labels, confidence = drawn()
  found = balanced(labels, confidence, PER_CLASS, seed=0)
  indices = np.flatnonzero(labels == 0).tolist()
  ranked = sorted((-confidence[index], index) for index in indices)
  chosen = {index for _, index in ranked[:PER_CLASS]}
  assert {i: found[i] for i in indices} == {i: i in chosen for i in indices}
  assert ranked[PER_CLASS - 1][0] == ranked[PER_CLASS][0]  # there was a tie


def test_small_classes_are_copied_evenly():
  """3 images get 2, 2 and 3 copies, in random order; 1 image gets 7."""
  labels, confidence = drawn()
  most_copied = set()
  for seed in range(20):
    found = balanced(labels, confidence, PER_CLASS, seed)
    copies = {k: found[(labels == k) & (found > 0)] for k in SIZES}
    assert {each.sum() for each in copies.values()} == {PER_CLASS}
    assert sorted(copies[1]) == [2, 2, 3] and copies[4].tolist() == [7]
    assert copies[2].tolist() == [1] * 7
    most_copied.add(int(copies[1].argmax()))
    again = balanced(labels, confidence, PER_CLASS, seed)
    np.testing.assert_array_equal(found, again)
  assert most_copied == {0, 1, 2}
