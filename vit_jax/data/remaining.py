"""Source of the examples that remain when an interrupted pass is resumed."""

from typing import Any

from vit_jax.data import contract
from vit_jax.data.contract import Source

UNLABELLED = 0  # placeholder label, because transforms require a label


class Remaining:
  """The examples of a source whose index is at least `start`."""

  def __init__(self, source: Source, start: int):
    """Wraps a source.

    Args:
      source: source of all examples.
      start: index of the first remaining example.
    """
    self._source, self._start = source, start
    self.name, self.num_classes = source.name, source.num_classes or 1
    self.class_names = source.class_names

  def __len__(self) -> int:
    return len(self._source) - self._start

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'label': UNLABELLED, **self._source[self._start + index]}

  def where(self, index: int) -> str:
    """Returns the location of an example, if the source provides it."""
    return contract.where(self._source, self._start + index)
