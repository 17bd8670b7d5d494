"""Class lists: which index and which name a class has."""

import collections
import os
from collections.abc import Iterable

from vit_jax.data import files
from vit_jax.errors import UserError, closest


class Classes:
  """The classes of a data set, in the order of their labels.

  Attributes:
    keys: what the data set calls them (folders, or labels in a file).
    names: for people.
  """

  def __init__(self, keys: Iterable[str], names: Iterable[str] | None = None):
    self.keys = list(keys)
    self.names = list(self.keys if names is None else names)
    self._index = {key: i for i, key in enumerate(self.keys)}

  def label(self, key: str, where: str) -> int:
    """The label of a class.

    Args:
      key: what the data set calls it.
      where: file, and line if there is one, for the message.

    Raises:
      UserError: no such class.
    """
    if key not in self._index:
      raise UserError(
        f'{where} is of the class {key!r}, which is not among the '
        f'{len(self.keys)} classes; {_nearest(key, self.keys)}. Mend it, or '
        'the list of classes.'
      )
    return self._index[key]


def load(path: str) -> Classes:
  """Reads a list of classes: a line for each, in the order of their labels.

  A line is the class as the data set calls it, and after a tab, if wanted, its
  name for people: 'n01440764<TAB>tench'. Blank lines are left out.

  Raises:
    UserError: no such file, no class in it, or one twice.
  """
  text = files.read_text(os.path.expanduser(path), 'source.class_map')
  rows = [
    [part.strip() for part in line.split('\t', 1)]
    for line in text.splitlines()
    if line.strip()
  ]
  keys = [row[0] for row in rows]
  counts = collections.Counter(keys).most_common(3)
  twice = [key for key, count in counts if count > 1]
  if not keys or twice:
    came = f'{", ".join(twice)} more than once' if twice else 'no class'
    raise UserError(
      f'{path} lists {came}: give one class a line, in the order of their '
      'labels.'
    )
  return Classes(keys, [row[-1] for row in rows])


def numbered(
  largest: int, known: Classes | None = None, where: str = ''
) -> Classes:
  """The classes of labels that are whole numbers.

  Args:
    largest: of the labels.
    known: a list that names them, if there is one.
    where: the labels' file, for the message.

  Raises:
    UserError: the list is too short.
  """
  if known is None:
    return Classes(str(i) for i in range(largest + 1))
  if largest >= len(known.keys):
    raise UserError(
      f'{where} has the label {largest}, and source.class_map lists '
      f'{len(known.keys)} classes, 0 to {len(known.keys) - 1}: mend one.'
    )
  return known


def _nearest(key: str, keys: list[str]) -> str:
  text = closest(key, keys)
  return text if len(text) < 200 else text[:200] + ' …'
