"""Selects confident images for training, balanced over the classes."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Choice(NamedTuple):
  """Selected images.

  Attributes:
    rows: distinct indices of the selected examples, ascending.
    copies: number of copies of each example, at least 1.
  """

  rows: Int[np.ndarray, ' m']
  copies: Int[np.ndarray, ' m']


def balanced(
  labels: Int[np.ndarray, ' n'],
  confidence: Float[np.ndarray, ' n'],
  per_class: int,
  seed: int,
) -> Choice:
  """Selects the same number of examples of each class.

  If a class has more images, the most confident ones are selected, and the
  first of equally confident ones. If it has fewer, all its images get the same
  number of copies, and randomly chosen images an additional one, so that the
  number is exact.

  Args:
    labels: class of each image.
    confidence: predicted probability of that class, in [0, 1].
    per_class: number of examples of each class; 0 selects every image once.
    seed: seed of the choice of images that get an additional copy.

  Reference: Noisy Student, Xie et al., arXiv 1911.04252, section 3.1: 130K
  images per class, duplicated at random. Difference: its code draws for each
  image independently whether it gets an additional copy; here the number of
  examples per class is exact.
  """
  copies = np.ones(len(labels), np.int64)
  if per_class:
    copies[:] = 0
    for label in np.unique(labels):
      rows = np.flatnonzero(labels == label)
      rows = rows[np.argsort(-confidence[rows], kind='stable')][:per_class]
      quotient, remainder = divmod(per_class, len(rows))
      copies[rows] = quotient
      rng = np.random.default_rng([seed, int(label)])
      copies[rng.permutation(rows)[:remainder]] += 1
  rows = np.flatnonzero(copies)
  return Choice(rows, copies[rows])
