"""Class lists: the index and the display name of each class."""

import collections
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from vit_jax.data.storage import files
from vit_jax.errors import UserError, closest

_MOST = 1_000_000  # classes that labels of a part of a data set may speak of
_NUMBER = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?', re.IGNORECASE)
_SPACED = re.compile(r'(\d+)[\s,;:]+\S')
_REMEDY = (
  'Number them so, or list them in --config.source.class_map, one per line: '
  'the label, a tab, a name.'
)


class Classes:
  """The classes of a dataset, in the order of their labels.

  Attributes:
    keys: names in the dataset (folders, or labels in a file).
    names: display names.
  """

  def __init__(self, keys: Iterable[str], names: Iterable[str] | None = None):
    self.keys = list(keys)
    self.names = list(self.keys if names is None else names)
    self._index = {key: i for i, key in enumerate(self.keys)}

  def label(self, key: str, where: str) -> int:
    """Returns the label of a class.

    Args:
      key: name of the class in the dataset.
      where: file, and line if there is one, for the message.

    Raises:
      UserError: the class does not exist.
    """
    if key not in self._index:
      raise UserError(
        f'{where} has the class {key!r}, which is not one of the '
        f'{len(self.keys)} classes; {_nearest(key, self.keys)}. Correct it, or '
        'the list of classes.'
      )
    return self._index[key]


def load(path: str) -> Classes:
  """Reads a list of classes: one per line, in the order of their labels.

  A line contains the class as the dataset writes it, and optionally a tab and
  its display name: 'n01440764<TAB>tench'. Blank lines are ignored.
  """
  text = files.read_text(os.path.expanduser(path), 'source.class_map')
  if _is_json(text):
    raise UserError(
      f'{path} is JSON: write plain text with one class per line, in the '
      'order of the labels; a display name may follow after a tab.'
    )
  rows = [
    [part.strip() for part in line.split('\t', 1)]
    for line in io.StringIO(text, newline=None)
    if line.strip()
  ]
  keys = [row[0] for row in rows]
  counts = collections.Counter(keys).most_common(3)
  twice = [key for key, count in counts if count > 1]
  if not keys or twice:
    came = f'{", ".join(twice)} more than once' if twice else 'no class'
    raise UserError(
      f'{path} lists {came}: give one class per line, in the '
      'order of the labels.'
    )
  return Classes(keys, [row[-1] for row in rows])


def _is_json(text: str) -> bool:
  if text.split(maxsplit=1)[:1] in (['{'], ['[']):
    return True  # damaged perhaps, but meant so
  try:
    return isinstance(json.loads(text), dict | list)
  except (ValueError, RecursionError):
    return False


def text_of(value: Any) -> str | None:
  """Returns a label in a list or a JSON file as text.

  Args:
    value: a whole number, or a name; blanks around it do not count.

  Returns:
    Its text; None for anything else.
  """
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return (value.strip() or None) if isinstance(value, str) else None


def number(
  texts: Collection[str],
  where: Callable[[str], str],
  known: Classes | None = None,
  *,
  whole: bool,
  remedy: str = _REMEDY,
) -> tuple[Classes, dict[str, int]]:
  """Returns the classes of a dataset, and the class of each of its labels.

  With a list of classes, labels are what its lines begin with, names or
  numbers. If the list has names only and the labels are numbers, they are
  positions in it, from 0. Without a list, numbers are classes 0 to the largest,
  and names are numbered in sorted order.

  Args:
    texts: distinct labels.
    where: function from a label to its file, and line if there is one, for
      messages.
    known: the list, if there is one.
    whole: whether these are all labels of the dataset: then names can be
      numbered, and at least half of the numbers up to the largest must occur.
    remedy: advice about labels that are not 0 to K-1, for messages.

  Returns:
    The classes and {label: number of its class}.

  Raises:
    UserError: a label is not in the list; or there is no list, and the labels
      do not determine one.
  """
  names = sorted(text for text in texts if not text.isdecimal())
  values = {t: _value(t) for t in sorted(texts) if t.isdecimal()}
  largest = max(values, key=values.__getitem__, default='')
  if known is not None:
    if names or any(key.isdecimal() for key in known.keys):
      return known, _by_key(texts, where, known)
    _check_places(known, values[largest], f'{where(largest)} has the label')
    return known, values
  if not names:
    count = values[largest] + 1
    if count > (2 * len(set(values.values())) if whole else _MOST):
      raise UserError(
        f'{where(largest)} has the label {_short(largest)}, and there are '
        f'{len(values)} different labels: without a list of classes they must '
        f'be 0 to K-1 for K classes. {remedy}'
      )
    return Classes(map(str, range(count))), values
  _check_names(names, where, remedy)
  if values:
    raise UserError(
      f'{where(names[0])} has a name as label ({names[0]!r}), and '
      f'{where(largest)} a number ({largest!r}): use one kind, or list all in '
      '--config.source.class_map.'
    )
  if not whole:
    raise UserError(
      f'{where(names[0])} has a label that is a name ({names[0]!r}): list the '
      'names in the order of their numbers in a file, and give it as '
      '--config.source.class_map.'
    )
  return Classes(names), {name: i for i, name in enumerate(names)}


def _check_names(
  names: list[str], where: Callable[[str], str], remedy: str
) -> None:
  """Refuses names that look like numbers."""
  for name in names:
    if _NUMBER.fullmatch(name):
      raise UserError(
        f'{where(name)} has the label {_short(name)}: a label is a name or an '
        f'integer of at least 0. {remedy}'
      )


def _by_key(
  texts: Collection[str], where: Callable[[str], str], known: Classes
) -> dict[str, int]:
  """Classes of labels as the list calls them; '7' is also its '007'."""
  numbers = [key for key in known.keys if key.isdecimal()]
  keys = {_value(key): key for key in reversed(numbers)}
  here = set(known.keys)
  return {
    text: known.label(
      keys.get(_value(text), text)
      if text.isdecimal() and text not in here
      else text,
      where(text),
    )
    for text in sorted(texts)
  }


def _check_places(known: Classes, largest: int, came: str) -> None:
  """Refuses places beyond the list, and lines whose label has no tab."""
  if largest >= len(known.keys):
    raise UserError(
      f'{came} {largest}, and source.class_map lists {len(known.keys)} '
      f'classes, 0 to {len(known.keys) - 1}: correct one of them, or begin '
      'each line of the list with a label and a tab.'
    )
  begins = [_SPACED.match(key) for key in known.keys]
  if all(begins) and any(
    found and _value(found[1]) != place for place, found in enumerate(begins)
  ):
    raise UserError(
      f'source.class_map has the line {known.keys[0]!r}, which begins with a '
      'number and has no tab: put a tab between a label and its name.'
    )


def _value(text: str) -> int:
  """Returns a decimal number, limited to the largest int64."""
  digits = text.lstrip('0')
  return int(text) if len(digits) < 19 else 2**63 - 1


def _short(text: str) -> str:
  return text if len(text) < 50 else f'{text[:50]}…'


def _nearest(key: str, keys: list[str]) -> str:
  text = closest(key, keys)
  return text if len(text) < 200 else text[:200] + ' …'
