"""Source of the remaining examples, for a pass that is resumed."""

from typing import Any

from vit_jax.data.contract import Source

UNLABELLED = 0  # label of unlabelled examples, because transforms require one


class Remaining:
  """The examples of a source whose index is at least `start`."""

  def __init__(self, source: Source, start: int):
    """Wraps a source.

    Args:
      source: source of all examples.
      start: index of the first example.
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
    index += self._start
    return getattr(self._source, 'where', lambda _: '')(index)
