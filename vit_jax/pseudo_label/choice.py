"""Which images are learned from, and how often: confident ones, balanced."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Choice(NamedTuple):
  """Images that were chosen.

  Attributes:
    rows: of those given, each once, rising.
    copies: of each of them, at least 1.
  """

  rows: Int[np.ndarray, ' m']
  copies: Int[np.ndarray, ' m']


def balanced(
  labels: Int[np.ndarray, ' n'],
  confidence: Float[np.ndarray, ' n'],
  per_class: int,
  seed: int,
) -> Choice:
  """As many examples of each class.

  Of a class with more images the most confident are taken; equal ones in the
  order given. Of a class with fewer, every image has so many whole copies as
  fit, and a random part of them one more.

  Args:
    labels: class of each image.
    confidence: in that class.
    per_class: examples of each class; 0 for every image once.
    seed: of the random part.

  Reference: Noisy Student, Xie et al., arXiv 1911.04252, section 3.1: 130K a
  class, duplicated at random. Its code draws for each image by itself whether
  it has one copy more; here sums are exact.
  """
  copies = np.ones(len(labels), np.int64)
  if per_class:
    copies[:] = 0
    for label in np.unique(labels):
      rows = np.flatnonzero(labels == label)
      rows = rows[np.argsort(-confidence[rows], kind='stable')][:per_class]
      whole, rest = divmod(per_class, len(rows))
      copies[rows] = whole
      rng = np.random.default_rng([seed, int(label)])
      copies[rng.permutation(rows)[:rest]] += 1
  rows = np.flatnonzero(copies)
  return Choice(rows, copies[rows])
