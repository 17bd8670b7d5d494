"""Which images are learned from, and how often: confident ones, balanced."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Choice(NamedTuple):
  """Images that were chosen.

  Attributes:
    rows: indices of the chosen examples, each once, ascending.
    copies: number of copies of each of them, at least 1.
  """

  rows: Int[np.ndarray, ' m']
  copies: Int[np.ndarray, ' m']


def balanced(
  labels: Int[np.ndarray, ' n'],
  confidence: Float[np.ndarray, ' n'],
  per_class: int,
  seed: int,
) -> Choice:
  """Chooses the same number of examples of each class.

  For a class with more images, the most confident ones are taken (of equally
  confident ones, the first). For a class with fewer, every image is copied as
  often as a whole number of copies fits, and a random part of the images once
  more.

  Args:
    labels: class of each image.
    confidence: probability of that class.
    per_class: examples of each class; 0 takes every image once.
    seed: seed of the random part.

  Reference: Noisy Student, Xie et al., arXiv 1911.04252, section 3.1: 130K
  images per class, duplicated at random. Its code decides for each image
  independently whether it is copied once more; here the totals are exact.
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
