"""Maps the labels of a dataset to those of a head by the names of classes."""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Int

from vit_jax.data import contract
from vit_jax.data.contract import Source
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError

log = logging.getLogger('vit_jax')
_SHOWN = 5  # maximum number of class names in a message


class Relabelled:
  """A source whose labels are mapped to another list of class names.

  Attributes:
    name: name of the source.
    num_classes: number of classes of the other list.
    class_names: class names of the other list.
  """

  def __init__(self, source: Source, class_names: Sequence[str]):
    """Maps labels by name.

    Args:
      source: source whose class names are a subset of `class_names`.
      class_names: class names in the order of the new labels.
    """
    self._source, self._several = source, ''
    index = {name: i for i, name in enumerate(class_names)}
    self._labels = [index[name] for name in source.class_names]
    self.name = source.name
    self.num_classes, self.class_names = len(class_names), list(class_names)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    example = self._source[index]
    mapped = {**example, 'label': self._mapped(example['label'])}
    if self._several in example:
      labels = example[self._several]
      mapped[self._several] = [self._mapped(label) for label in labels]
    return mapped

  def with_labels(self, key: str) -> 'Relabelled':
    """Returns this source, whose examples also have a list of mapped labels."""
    other = copy.copy(self)
    other._several = key
    if hasattr(self._source, 'with_labels'):
      other._source = cast(Any, self._source).with_labels(key)
    return other

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the rows of the source if it has any; see `data.contract`."""
    yield from getattr(self._source, 'rows', tuple)()

  def where(self, index: int) -> str:
    """Returns the location of an example, if the source provides it."""
    return contract.where(self._source, index)

  def _mapped(self, label: Any) -> int:
    label = int(label)
    # A negative label would be a valid index of the list.
    if not 0 <= label < len(self._labels):
      raise DecodeError(f'label {label}; allowed: 0 to {len(self._labels) - 1}')
    return self._labels[label]


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
  own, known = list(source.class_names), list(class_names)
  if own == known[: len(own)]:
    return source
  if numbered(own) or numbered(known):
    log.info(
      '%s: class names cannot be compared with those of %s, because one of '
      'them has numbers in place of names; labels are used without mapping',
      source.name,
      head,
    )
    return source
  unique = len(set(own)) == len(own) and len(set(known)) == len(known)
  if not unique or not set(own) <= set(known):
    raise UserError(
      f'the classes of {source.name} differ from those of {head}: '
      f'{names_differ(known, own, ("in the head", "in the data"))}. Use data '
      'with the same classes, rename the classes (by source.class_map for '
      'most sources), or fine-tune on this data first.'
    )
  log.warning(
    '%s: the order of the %d classes differs from that of the %d classes of '
    '%s; labels are mapped by name',
    source.name,
    len(own),
    len(known),
    head,
  )
  return Relabelled(source, known)


def numbered(class_names: Sequence[str]) -> bool:
  """Returns whether each name is only its index, such as '3' or 'class 3'."""
  return all(
    re.fullmatch(rf'(class[ _]?)?0*{i}', name, re.IGNORECASE)
    for i, name in enumerate(class_names)
  )


def names_differ(
  old: Iterable[str],
  new: Iterable[str],
  places: tuple[str, str] = ('before', 'now'),
) -> str:
  """Describes the differences between two lists of class names in one line.

  Args:
    old: first list.
    new: second list.
    places: phrases that identify the first and the second list in the text, for
      example ('in the head', 'in the data').
  """
  old, new = list(old), list(new)
  parts = [
    f'{len(only)} only {place} ({_some(only)})'
    for place, only in (
      (places[0], [name for name in old if name not in set(new)]),
      (places[1], [name for name in new if name not in set(old)]),
    )
    if only
  ]
  if not parts:
    moved = [name for i, name in enumerate(new) if old[i : i + 1] != [name]]
    parts = [f'the same names in another order or repeated: {_some(moved)}']
  counts = f'{len(old)} {places[0]}, {len(new)} {places[1]}'
  return f'{counts}; {", ".join(parts)}'


def _some(names: list[str]) -> str:
  more = ', …' if len(names) > _SHOWN else ''
  return ', '.join(map(repr, names[:_SHOWN])) + more
