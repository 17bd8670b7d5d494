"""Sampling of training examples such that each class occurs equally often."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from vit_jax.data.contract import Source, Wrapped
from vit_jax.data.pipeline import order
from vit_jax.errors import UserError


class Balanced(Wrapped):
  """A source whose classes are drawn equally often in training.

  Of k consecutive positions (k classes, starting at a multiple of k), each
  class has exactly one. All examples of a class are drawn before one of them is
  drawn again. Classes without examples are left out. The example at a position
  is computed from the seed and the position, as for any other source.

  Everything else is that of the wrapped source.
  """

  def __init__(self, source: Source):
    """Reads the labels of all examples.

    Args:
      source: source of the training examples.

    Raises:
      UserError: the source has no labels, or an order of its own.
    """
    super().__init__(source)
    can_be_balanced = source.num_classes and not source.own_order
    self._labels = labels(source) if can_be_balanced else np.zeros(0, np.int64)
    counts = np.bincount(
      self._labels[self._labels >= 0], minlength=source.num_classes
    )
    if not counts.any():
      raise UserError(
        f'train.balanced is set, but {source.name} has no valid labels, or an '
        'order of its own: set it to False; for a mixture, set weights.'
      )
    # Number of examples of each class, and the classes that have examples.
    self._counts, self._classes = counts, np.flatnonzero(counts)
    # Examples sorted by class; those without a valid label (-1) come first.
    self._by_class = np.argsort(self._labels, kind='stable')
    # Index in `_by_class` of the first example of each class.
    num_invalid = len(self._by_class) - counts.sum()
    self._starts = num_invalid + np.cumsum(counts) - counts

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Fingerprint of the wrapped source."""
    return self._source.fingerprint

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the rows of the wrapped source."""
    yield from self._source.rows()

  def locate(
    self, positions: Int[np.ndarray, ' n'], seed: int
  ) -> Int[np.ndarray, ' n']:
    """Returns the indices of the examples at positions in training.

    Args:
      positions: int64 positions ≥ 0, counted from the start of training.
      seed: seed of the run.

    Returns:
      int64 indices in [0, len(self)).
    """
    counts = self._counts[self._classes]
    group, row = order.balanced(positions, counts, seed)
    label = self._classes[group]
    return self._by_class[self._starts[label] + row]

  def replacements(self, index: int) -> Int[np.ndarray, ' m']:
    """Returns the indices of all examples of the same class.

    A bad record is replaced by an example of its own class.
    """
    label = self._labels[index]
    start = self._starts[label]
    return self._by_class[start : start + self._counts[label]]


def labels(source: Source) -> Int[np.ndarray, ' n']:
  """Returns the labels of all examples; -1 for those without a valid label.

  Args:
    source: any source with labels.
  """
  values = np.asarray(source.labels(), np.int64)
  return np.where((values >= 0) & (values < source.num_classes), values, -1)
