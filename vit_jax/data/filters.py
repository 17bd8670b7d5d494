"""Sources that leave out or relabel the examples of another source.

`Chosen` contains the examples that an interrupted pass has yet to read.
`Relabelled` maps labels to those of a head by the names of classes.

A list is a file of JSON lines, which `check_data --against` writes. Each line
identifies an example by its position in a part of the data (see `rows` in
`data.contract`), so a list applies to every split of the same data, wherever
they are stored:

  {"part": "train", "position": 17, "checksum": "6f1c…", "where": "…", …}

The checksum of the encoded image detects lists of other data. Further keys,
such as `where`, are for readers.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Int

from vit_jax.data import fingerprint
from vit_jax.data.contract import Source, Wrapped, check_label
from vit_jax.data.storage.splits import Concatenation
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths

log = logging.getLogger('vit_jax')
_SAMPLES = 8  # number of examples whose checksums are compared
_NO_LABEL = 0  # label of examples without one, because transforms require it
_OTHER_DATA = (
  'The list belongs to other data, or the data has changed: write it again '
  'with python -m vit_jax.check_data --against.'
)
_MAX_NAMES = 5  # maximum number of class names in a message
# Directory of a file in the name of a part: '/data/cifar10/3.0.2/FILE', or, of
# a member of a mixture, 'MEMBER//data/cifar10/3.0.2/FILE'.
_DIRECTORY = re.compile(r'(?:^|(?<=/))(?:/|gs://).*/')


class Chosen(Wrapped):
  """Some examples of a source."""

  def __init__(self, source: Source, indices: Int[np.ndarray, ' n']):
    """Wraps a source.

    Args:
      source: source of all examples.
      indices: indices of the examples, in their order.
    """
    super().__init__(source)
    # A source without labels has the single class of the label `_NO_LABEL`.
    self.num_classes = source.num_classes or 1
    self._indices = indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'label': _NO_LABEL, **super().__getitem__(index)}

  def _find(self, index: int) -> int:
    return int(self._indices[index])


def without(source: Source, indices: Int[np.ndarray, ' n']) -> Source:
  """Returns a source without some of its examples.

  Args:
    source: source of all examples.
    indices: int64 indices of the examples to leave out, ascending.

  Raises:
    UserError: no example remains; or the source defines its own order, but not
      the method `without` (see `data.contract`).
  """
  if not len(indices):
    return source
  if len(indices) == len(source):
    raise UserError(
      f'train.leave_out lists all {len(source)} examples of {source.name}.'
    )
  return source.without(indices)


def without_listed(
  source: Source, path: str | None, strict: bool = True
) -> Source:
  """Returns a source without the examples of a list; see `listed`, `without`.

  Args:
    source: source of all examples.
    path: local path or gs:// address of the list; None for the unchanged
      source.
    strict: whether a list of other data is an error; otherwise the source is
      returned unchanged.

  Raises:
    UserError: the list does not exist, cannot be parsed, or belongs to other
      data; or see `without`.
  """
  return without(source, listed(source, path, strict))


def listed(
  source: Source, path: str | None, strict: bool = True
) -> Int[np.ndarray, ' n']:
  """Returns the indices of the examples of a list, ascending.

  Args:
    source: source of the examples.
    path: local path or gs:// address of the list; None for no example.
    strict: whether a list of other data is an error; otherwise it contains no
      example of the source.

  Raises:
    UserError: the list does not exist, cannot be parsed, or belongs to other
      data.
  """
  none = np.zeros(0, np.int64)
  if path is None:
    return none
  by_part = _read(paths.locate(path))
  if not strict and not list(source.rows()):
    return none  # other data, without positions
  entries = _matches(source, by_part)
  if entries is None:
    problem, entries = f'lists examples of {next(iter(by_part))!r}.', []
  else:
    problem = _changed_image(source, entries)
  if problem and strict:
    raise UserError(f'{source.name}: {path} {problem} {_OTHER_DATA}')
  if problem:
    log.info('%s: no example is left out: %s %s', source.name, path, problem)
    return none
  log.info('%s: %d examples are left out (%s)', source.name, len(entries), path)
  return np.array([index for index, _ in entries], np.int64)


def _matches(
  source: Source, by_part: dict[str, dict[int, dict[str, Any]]]
) -> list[tuple[int, dict[str, Any]]] | None:
  """Finds the examples of a list.

  Args:
    source: source of the examples.
    by_part: {part: {position: object of the line}}.

  Returns:
    (index, object of the line) of each listed example, in the order of the
    indices; None if all listed examples belong to other parts.
  """
  # Files that were moved have another directory.
  by_file = {_DIRECTORY.sub('', part): x for part, x in by_part.items()}
  entries, start, is_known = [], 0, not by_part
  for part, rows in checked_rows(source):  # a part can occur several times
    by_position = by_part.get(part, by_file.get(_DIRECTORY.sub('', part)))
    if by_position is not None:
      is_known = True
      matches = np.flatnonzero(np.isin(rows, list(by_position))).tolist()
      entries += [(start + i, by_position[int(rows[i])]) for i in matches]
    start += len(rows)
  return entries if is_known else None


def _changed_image(
  source: Source, entries: list[tuple[int, dict[str, Any]]]
) -> str:
  """Compares the checksums of evenly spaced entries of a list.

  Args:
    source: source of the examples.
    entries: see `_matches`.

  Returns:
    The end of a sentence about the list, if an image has changed; else ''.
  """
  for i in fingerprint.spaced(len(entries), _SAMPLES):
    index, entry = entries[i]
    if fingerprint.image_checksum(source, index) != entry['checksum']:
      return (
        f'lists another image at the position {entry["position"]} of '
        f'{entry["part"]!r}: {source.where(index)} has changed.'
      )
  return ''


def list_entries(
  source: Source, indices: Int[np.ndarray, ' n']
) -> list[dict[str, Any]]:
  """Returns the lines of a list of examples, one for each example.

  Args:
    source: source of the examples.
    indices: indices of the examples to list.

  Raises:
    UserError: the source does not have the method `rows`.
  """
  parts = checked_rows(source)
  concatenation = Concatenation(len(rows) for _, rows in parts)
  entries = []
  for index in indices.tolist():
    part_index, row = concatenation.find(index)
    part, rows = parts[part_index]
    entries.append(
      {
        'part': part,
        'position': int(rows[row]),
        'checksum': fingerprint.image_checksum(source, index),
        'where': source.where(index),
      }
    )
  return entries


def checked_rows(source: Source) -> list[tuple[str, Int[np.ndarray, ' n']]]:
  """Returns the rows of a source, see `data.contract`, and checks their number.

  Raises:
    UserError: `rows` does not return the position of every example.
  """
  parts = list(source.rows())
  count = sum(len(part_rows) for _, part_rows in parts)
  if count != len(source):
    raise UserError(
      f'{source.name} cannot be listed or left out: `rows` of its class '
      f'{type(source).__qualname__} has {count} of {len(source)} positions.'
    )
  return parts


def _read(path: epath.Path) -> dict[str, dict[int, dict[str, Any]]]:
  """Reads a list; returns {part: {position: object of the line}}."""
  if not path.exists():
    raise UserError(
      f'{path} does not exist.{paths.nearest(path)} If the list was moved, '
      'give --config.train.leave_out=PATH.'
    )
  by_part: dict[str, dict[int, dict[str, Any]]] = {}
  for line, entry in jsonl.read(path):
    match entry:
      # A position that is a string, for example, would not match any example.
      case {
        'part': str(part),
        'position': int(at),
        'checksum': str() | None,
      } if at >= 0:
        by_part.setdefault(part, {})[at] = entry
      case _:
        raise UserError(
          f'train.leave_out: {path} contains the line {line!r:.100}; required '
          'are part (text), position (integer) and checksum (text or null).'
        )
  return by_part


class Relabelled(Wrapped):
  """A source whose labels are mapped to another list of class names."""

  def __init__(self, source: Source, class_names: Sequence[str]):
    """Maps labels by name.

    Args:
      source: source whose class names are a subset of `class_names`.
      class_names: class names in the order of the new labels.
    """
    super().__init__(source)
    new_labels = {name: label for label, name in enumerate(class_names)}
    self._new_labels = [new_labels[name] for name in source.class_names]
    self.num_classes, self.class_names = len(class_names), list(class_names)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return relabelled(self._source[index], self.label_keys, self._new_labels)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the rows of the source."""
    yield from self._source.rows()


def relabelled(
  example: dict[str, Any], keys: Iterable[str], new_labels: Sequence[int]
) -> dict[str, Any]:
  """Returns an example with new labels.

  Args:
    example: example of a source.
    keys: keys whose values are labels, or lists of them, if they exist.
    new_labels: new label for each label of the source.

  Raises:
    DecodeError: a label is out of range.
  """

  def mapped(label: Any) -> Any:
    if isinstance(label, list):
      return [mapped(each) for each in label]
    # A negative label would be a valid index of the list.
    check_label(label, len(new_labels))
    return new_labels[int(label)]

  return example | {key: mapped(example[key]) for key in keys if key in example}


def matched(source: Source, class_names: Sequence[str], head: str) -> Source:
  """Maps the labels of a source to those of a head, by the names of classes.

  Args:
    source: source that the head is evaluated on.
    class_names: class names of the head, in the order of its outputs; the head
      may have further outputs without names.
    head: name of the head, for messages.

  Returns:
    The unchanged source if its classes are the first classes of the head, in
    the same order, or if the source or the head has numbers in place of class
    names; otherwise a source whose labels are mapped by name.

  Raises:
    UserError: the source has a class that the head does not have.
  """
  if outputs(source, class_names, head) is None:
    return source
  text = 'labels are mapped by name, because the order of the classes differs'
  log.warning('%s and %s: %s', source.name, head, text)
  return Relabelled(source, class_names)


def outputs(
  source: Source, class_names: Sequence[str], head: str
) -> list[int] | None:
  """Returns the outputs of a head by the names of the classes of a source.

  Args:
    source: source of labels.
    class_names: class names of the head; see `matched`.
    head: name of the head, for messages.

  Returns:
    The index of the output for each class of the source; None if the labels
    are these indices, or if the source or the head has numbers in place of
    class names.

  Raises:
    UserError: the source has a class that the head does not have.
  """
  own, known = list(source.class_names), list(class_names)
  if own == known[: len(own)]:
    return None
  if numbered(own) or numbered(known):
    text = 'classes are not compared, because class names are numbers'
    log.info('%s and %s: %s', source.name, head, text)
    return None
  unique = len(set(own)) == len(own) and len(set(known)) == len(known)
  if not unique or not set(own) <= set(known):
    names = names_differ(known, own, ('in the head', 'in the data'))
    raise UserError(
      f'the classes of {source.name} differ from those of {head}: {names}. Use '
      'data with the same classes, rename them (source.class_map of most '
      'sources), or fine-tune on this data, which starts with a new head: '
      'python -m vit_jax.finetune.'
    )
  return [known.index(name) for name in own]


def numbered(class_names: Sequence[str]) -> bool:
  """Returns whether each name is only its index, such as '3' or 'class 3'."""
  return all(
    re.fullmatch(rf'(class[ _]?)?0*{i}', name, re.IGNORECASE)
    for i, name in enumerate(class_names)
  )


def names_differ(
  old: Iterable[str],
  new: Iterable[str],
  phrases: tuple[str, str] = ('before', 'now'),
) -> str:
  """Describes the differences between two lists of class names in one line.

  Args:
    old: first list.
    new: second list.
    phrases: phrases that identify the first and the second list in the text,
      for example ('in the head', 'in the data').
  """
  old, new = list(old), list(new)
  in_old, in_new = set(old), set(new)
  only_old = [name for name in old if name not in in_new]
  only_new = [name for name in new if name not in in_old]
  differences = [
    f'{len(only)} only {phrase} ({_first_names(only)})'
    for phrase, only in zip(phrases, (only_old, only_new), strict=True)
    if only
  ]
  if not differences:
    moved = [
      name for i, name in enumerate(new) if i >= len(old) or name != old[i]
    ]
    differences = [
      f'the same names in another order or repeated: {_first_names(moved)}'
    ]
  counts = f'{len(old)} {phrases[0]}, {len(new)} {phrases[1]}'
  return f'{counts}; {", ".join(differences)}'


def _first_names(names: list[str]) -> str:
  """Formats the first names of a list, for messages."""
  more = ', …' if len(names) > _MAX_NAMES else ''
  return ', '.join(map(repr, names[:_MAX_NAMES])) + more
