"""Class lists: the index and the display name of each class."""

import collections
import io
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from typing import Any

from vit_jax.data.storage import files
from vit_jax.errors import UserError, closest

_MOST = 1_000_000  # maximum number of classes without a list of classes
_NUMBER = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?', re.IGNORECASE)
# Name of the only class of images without labels.
UNLABELLED = 'unlabelled'
# Names of the classes of boolean labels.
BOOLEANS = ['False', 'True']
_DIGITS = 18  # all integers of up to 18 digits fit into int64
_REMEDY = (
  'Number them like this, or list them in --config.source.class_map, one per '
  'line: the label, a tab, a name.'
)


class Classes:
  """The classes of a dataset, in the order of their labels.

  Attributes:
    keys: names as in the dataset (of folders, or of labels in a file).
    names: display names.
  """

  def __init__(self, keys: Iterable[str], names: Iterable[str] | None = None):
    self.keys = list(keys)
    self.names = list(self.keys if names is None else names)
    # macOS may store names in another normal form of Unicode than Linux.
    self._index = {_composed(key): i for i, key in enumerate(self.keys)}
    self._index |= {key: i for i, key in enumerate(self.keys)}

  def label(self, key: str, where: str) -> int:
    """Returns the label of a class.

    Args:
      key: name of the class in the dataset.
      where: file, and line if there is one, for the message.

    Raises:
      UserError: the class does not exist.
    """
    label = self._index.get(key, self._index.get(_composed(key)))
    if label is None:
      raise UserError(
        f'{where} has the class {key!r}, which is not one of the '
        f'{len(self.keys)} classes; {closest(key, self.keys)}. Correct it, or '
        'the list of classes.'
      )
    return label


def _composed(name: str) -> str:
  """Returns a name in Unicode's composed normal form (NFC)."""
  return unicodedata.normalize('NFC', name)


def of_unlabelled(key: str) -> Classes:
  """Returns the class of images without labels.

  Args:
    key: name of the class in the dataset.
  """
  return Classes([key], [UNLABELLED])


def load(path: str) -> Classes:
  """Reads a list of classes: one per line, in the order of their labels.

  A line contains the class as in the dataset, and optionally a tab and its
  display name: 'n01440764<TAB>tench'. Blank lines are ignored.

  Args:
    path: path of the text file, local or remote.

  Raises:
    UserError: the file cannot be read, is empty, or lists a class twice.
  """
  text = files.read_text(os.path.expanduser(path), 'source.class_map')
  rows = [
    [part.strip() for part in line.split('\t', 1)]
    for line in io.StringIO(text, newline=None)
    if line.strip()
  ]
  keys = [row[0] for row in rows]
  repeated = [key for key, n in collections.Counter(keys).items() if n > 1]
  if not keys or repeated:
    problem = f'{repeated[0]} more than once' if repeated else 'no class'
    raise UserError(
      f'{path} lists {problem}: give one class per line, in the order of the '
      'labels.'
    )
  return Classes(keys, [row[-1] for row in rows])


def text_of(value: Any) -> str | None:
  """Converts a label in a list or a JSON file to text.

  Args:
    value: an integer, or a name, from which surrounding blanks are removed.

  Returns:
    Text of the label; None if the value has another type or is blank.
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
  """Numbers the classes of a dataset, given its distinct labels.

  With a list of classes, labels are keys of the list or, if all labels and none
  of the keys are integers, positions in the list, from 0. Without a list, the
  classes are 0 to the largest label if labels are integers, and the sorted
  labels if they are names.

  Args:
    texts: distinct labels.
    where: function from a label to its file, and line if there is one, for
      messages.
    known: list of classes, if there is one.
    whole: whether `texts` contains all labels of the dataset, so that names can
      be numbered.
    remedy: advice about labels that are not 0 to (number of classes - 1), for
      messages.

  Returns:
    Classes, and {label: index of its class}.

  Raises:
    UserError: a label is not in the list; or there is no list, and the labels
      do not determine the classes.
  """
  texts = sorted(texts)
  names = [text for text in texts if not text.isdecimal()]
  values = {t: _value(t) for t in texts if t.isdecimal()}
  largest = max(values, key=values.__getitem__, default='')
  if known and (names or any(key.isdecimal() for key in known.keys)):
    return known, {text: known.label(text, where(text)) for text in texts}
  numeric = next(filter(_NUMBER.fullmatch, names), largest)
  if names and numeric:
    raise UserError(
      f'{where(numeric)} has the label {_short(numeric)}, and '
      f'{where(names[0])} {_short(names[0])}: labels must be all names or all '
      f'integers of at least 0. {remedy}'
    )
  if names and not whole:
    raise UserError(
      f'{where(names[0])} has a label that is a name ({names[0]!r}): list the '
      'names in the order of their numbers in a file, and give it as '
      '--config.source.class_map.'
    )
  if names:
    return Classes(names), {name: i for i, name in enumerate(names)}
  count = len(known.keys) if known else min(values[largest] + 1, _MOST)
  if values[largest] >= count:
    raise UserError(
      f'{where(largest)} has the label {_short(largest)}, but labels must be '
      f'0 to {count - 1:,}, the '
      f'{"positions in source.class_map" if known else "numbers of classes"}. '
      f'{remedy}'
    )
  return known or Classes(map(str, range(count))), values


def _value(text: str) -> int:
  """Parses an integer; more than 18 digits give 10^18, to fit into int64."""
  return int(text) if len(text) <= _DIGITS else 10**_DIGITS


def _short(text: str) -> str:
  return text if len(text) < 50 else f'{text[:50]}…'
