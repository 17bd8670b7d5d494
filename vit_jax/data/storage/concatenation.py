"""Index arithmetic of several lists that are read as one."""

import bisect
import itertools
from collections.abc import Iterable


class Concatenation:
  """Maps an index in a concatenation to a list and a position in it."""

  def __init__(self, lengths: Iterable[int]):
    """Concatenates lists of the given lengths."""
    self._ends = list(itertools.accumulate(lengths))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def find(self, index: int) -> tuple[int, int]:
    """Returns (index of the list, position in that list) of an element.

    Args:
      index: index in the concatenation.

    Raises:
      IndexError: the index is negative, or beyond the end.
    """
    if not 0 <= index < len(self):
      raise IndexError(f'index {index} of {len(self)} examples')
    number = bisect.bisect_right(self._ends, index)
    return number, index - (self._ends[number - 1] if number else 0)
