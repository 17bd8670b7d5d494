"""Sampling of training examples such that each class occurs equally often."""

from typing import Any, cast

import numpy as np
from jaxtyping import Int

from vit_jax.data import progress
from vit_jax.data.contract import Source
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import order
from vit_jax.errors import UserError


class Balanced:
  """A source whose classes are drawn equally often in training.

  Of k consecutive positions (k classes, starting at a multiple of k), each
  class has exactly one. All examples of a class are drawn before one of them is
  drawn again. Classes without examples are left out. The example at a position
  is computed from the seed and the position, as without this class.

  Everything else is that of the wrapped source.

  Attributes:
    name: name of the source.
    num_classes: number of classes of the source.
    class_names: class names of the source.
  """

  def __init__(self, source: Source):
    """Reads the labels of all examples.

    Args:
      source: source of the training examples.

    Raises:
      UserError: the source has no labels, or an order of its own.
    """
    self.name, self.num_classes = source.name, source.num_classes
    self.class_names, self._source = source.class_names, source
    self._labels = np.zeros(0, np.int64)
    if source.num_classes and not hasattr(source, 'locate'):
      self._labels = labels(source)
    counts = np.bincount(
      self._labels[self._labels >= 0], minlength=source.num_classes
    )
    # Examples sorted by class; those without a valid label come first.
    self._by_class = np.argsort(self._labels, kind='stable')
    # Index in `_by_class` of the first example of each class.
    num_invalid = len(self._by_class) - counts.sum()
    self._starts = num_invalid + np.cumsum(counts) - counts
    self._counts, self._classes = counts, np.flatnonzero(counts)
    if not len(self._classes):
      raise UserError(
        f'train.balanced is set, but {source.name} has no valid labels, or an '
        'order of its own: set it to False; for a mixture, set weights.'
      )

  def __getattr__(self, name: str) -> Any:
    # Python calls this method only for names that are not found otherwise. A
    # private name is missing while a copy is unpickled.
    if name.startswith('_'):
      raise AttributeError(name)
    return getattr(self._source, name)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self._source[index]

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
    return self._by_class[self._starts[self._classes[group]] + row]

  def replacements(self, index: int) -> Int[np.ndarray, ' m']:
    """Returns the indices of all examples of the same class.

    A bad record is replaced by an example of its own class.
    """
    label = self._labels[index]
    start = self._starts[label]
    return self._by_class[start : start + self._counts[label]]


def labels(source: Source) -> Int[np.ndarray, ' n']:
  """Returns the labels of all examples; -1 for those without a valid label.

  They are those of `source.labels()`. If the source does not have this method,
  every example is read, but images are not decoded.

  Args:
    source: any source with labels.
  """
  if hasattr(source, 'labels'):
    values = np.asarray(cast(Any, source).labels(), np.int64)
  else:
    text = f'reading the labels of {source.name}'
    indices = progress.shown(iter(range(len(source))), len(source), text)
    values = np.array([_label(source, index) for index in indices], np.int64)
  return np.where((values >= 0) & (values < source.num_classes), values, -1)


def _label(source: Source, index: int) -> int:
  """Returns the label of an example; -1 for a bad record."""
  try:
    return int(source[index]['label'])
  except DecodeError:
    return -1
