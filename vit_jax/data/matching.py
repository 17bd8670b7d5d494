"""Labels of one data set, as a head trained on another has them: by name."""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Int

from vit_jax.data.contract import Source
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError

log = logging.getLogger('vit_jax')
_SHOWN = 5  # class names in a message


class Relabelled:
  """A source with its labels mapped to those of other class names.

  Attributes:
    name: the source's.
    num_classes: number of the other names.
    class_names: the other names.
  """

  def __init__(self, source: Source, class_names: Sequence[str]):
    """Maps labels by name.

    Args:
      source: each of its class names is one of the others.
      class_names: in the order of the labels to be given.
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
    found = {**example, 'label': self._mapped(example['label'])}
    if self._several in example:
      labels = example[self._several]
      found[self._several] = [self._mapped(label) for label in labels]
    return found

  def with_labels(self, key: str) -> 'Relabelled':
    """Returns the same source with a field of several labels, mapped too."""
    found = copy.copy(self)
    found._several = key
    if hasattr(self._source, 'with_labels'):
      found._source = cast(Any, self._source).with_labels(key)
    return found

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the source's examples, if it knows them; see `data.contract`."""
    yield from getattr(self._source, 'rows', tuple)()

  def where(self, index: int) -> str:
    """Returns the location of an example, if the source provides it."""
    return getattr(self._source, 'where', lambda _: '')(index)

  def _mapped(self, label: Any) -> int:
    label = int(label)
    if not 0 <= label < len(self._labels):  # before it becomes another's
      raise DecodeError(f'label {label}; allowed: 0 to {len(self._labels) - 1}')
    return self._labels[label]


def matched(source: Source, class_names: Sequence[str], head: str) -> Source:
  """Maps the labels of a source to those of a head, by the names of classes.

  Args:
    source: source that the head is evaluated on.
    class_names: class names of the head, in the order of its outputs; it may
      have more outputs than names.
    head: name of the head, for messages.

  Returns:
    The source itself if its labels are the head's, or if one of both has
    numbers in place of names; otherwise a source with labels mapped by name.

  Raises:
    UserError: the source has a class that the head does not have.
  """
  own, known = list(source.class_names), list(class_names)
  if own == known[: len(own)]:
    return source
  if numbered(own) or numbered(known):
    log.info(
      '%s: class names cannot be compared with those of %s, one of both has '
      'numbers for names; labels are taken as they are',
      source.name,
      head,
    )
    return source
  unique = len(set(own)) == len(own) and len(set(known)) == len(known)
  if not unique or not set(own) <= set(known):
    raise UserError(
      f'{source.name} has other classes than {head}: '
      f'{names_differ(known, own)}. Give data of the same classes, rename '
      'them (source.class_map names them for most sources), or fine-tune on '
      'these data first.'
    )
  log.warning(
    '%s: the %d classes stand in another order than the %d of %s; labels are '
    'mapped by name',
    source.name,
    len(own),
    len(known),
    head,
  )
  return Relabelled(source, known)


def numbered(class_names: Sequence[str]) -> bool:
  """Returns whether the names are numbers only: '3' or 'class 3'."""
  return all(
    re.fullmatch(rf'(class[ _]?)?0*{i}', name, re.IGNORECASE)
    for i, name in enumerate(class_names)
  )


def names_differ(old: Iterable[str], new: Iterable[str]) -> str:
  """Describes the differences of two lists of class names in one line."""
  old, new = list(old), list(new)
  parts = [
    f'{len(only)} only {place} ({_some(only)})'
    for place, only in (
      ('there', [name for name in old if name not in set(new)]),
      ('now', [name for name in new if name not in set(old)]),
    )
    if only
  ]
  if not parts:
    moved = [name for i, name in enumerate(new) if old[i : i + 1] != [name]]
    parts = [f'the same names in another order (or more often: {_some(moved)})']
  return f'{len(old)} there, {len(new)} now; ' + ', '.join(parts)


def _some(names: list[str]) -> str:
  more = ', …' if len(names) > _SHOWN else ''
  return ', '.join(map(repr, names[:_SHOWN])) + more
