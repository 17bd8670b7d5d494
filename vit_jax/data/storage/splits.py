"""Splits in TFDS notation: 'train', 'train[:99%]', 'train+validation'.

Listings are mostly sorted by class, so that `train[:90%]` of a listing would
lack whole classes. Splits are therefore cut in a random but fixed order: the
order of the hashes of the examples' names (`by_name`, `by_class`, `by_place`),
which does not depend on the order of the listing. TFDS shuffles when it
prepares a dataset, so its splits are cut in the order in which they are stored.
"""

import bisect
import itertools
import math
import os
import re
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int, UInt64

from vit_jax.data import contract
from vit_jax.data.pipeline.order import mix
from vit_jax.errors import UserError, closest

T = TypeVar('T')
# Names of splits in the names of shards and of their folders, see `of_file`.
NAMES = ('train', 'validation', 'val', 'test')
KINDS = {  # kinds of splits, and the names of their folders
  'train': ('train', 'training'),
  'validation': ('validation', 'val', 'valid', 'dev'),
  'test': ('test', 'testing'),
}
_NAME = re.compile(r'^[\w-]+')  # the name at the start of 'train[:99%]'
# A name of a split that is not a part of a longer word such as 'constrain'.
_WORD = re.compile(rf'(?<![a-z])({"|".join(NAMES)})(?![a-z])')
_PARTS = 'train[:99%], train[1000:2000] or train+validation'
_CHUNK = 1 << 20  # names hashed at once, to limit the memory


class Concatenation:
  """Index arithmetic of several lists that are read as one."""

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


class Selection(Sequence[tuple[str, int]]):
  """The examples of all parts of a spec, such as 'train[:10%]+test[5:7]'.

  `selection[i]` is the (split, position) of example i.
  """

  def __init__(
    self,
    spec: str,
    lengths: Mapping[str, int],
    cut: Callable[[str], Int[np.ndarray, ' n']] | None = None,
  ):
    """Resolves a spec; see `resolve`.

    Args:
      spec: split as in TFDS, 'train[:10%]+test[5:7]', or 'all'.
      lengths: {split: number of examples}.
      cut: function of the name of a split that returns the order in which it is
        cut, a permutation such as that of `by_name`; it is called only for
        splits that are not used as a whole. Within a part, examples are sorted
        by position. By default, splits are cut in the order of the positions.

    Raises:
      UserError: see `resolve`.
    """
    self._parts: list[tuple[str, range | np.ndarray]] = []
    for split, rows in resolve(spec, lengths):
      if cut is not None and len(rows) < lengths[split]:
        rows = np.sort(cut(split)[rows.start : rows.stop])
      self._parts.append((split, rows))
    self._index = Concatenation(len(rows) for _, rows in self._parts)

  def __len__(self) -> int:
    return len(self._index)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields (split, positions in the split) of each part."""
    for split, rows in self._parts:
      yield split, np.asarray(rows)

  def __getitem__(self, index: int) -> tuple[str, int]:
    number, position = self._index.find(index)
    split, rows = self._parts[number]
    return split, int(rows[position])

  def gather(
    self, values: Mapping[str, Int[np.ndarray, ' m']]
  ) -> Int[np.ndarray, ' n']:
    """Returns the values of the examples, given those of each whole split."""
    return np.concatenate([values[split][rows] for split, rows in self.rows()])


class Selected(contract.Source):
  """Base class of sources that read a `Selection`."""

  _selection: Selection

  def __len__(self) -> int:
    return len(self._selection)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the examples as (split, positions in it); see `data.contract`."""
    yield from self._selection.rows()


def named(spec: str, there: Collection[str]) -> list[str]:
  """Returns the splits that a spec uses, so that only those need to be listed.

  Args:
    spec: split as in TFDS, 'train[:10%]+test[5:7]'.
    there: names of the splits that exist.

  Raises:
    UserError: a split does not exist.
  """
  names = []
  for piece in spec.split('+'):
    match = _NAME.match(piece.strip())
    name = match[0] if match else piece
    if name == 'all':
      names += there
    elif name in there:
      names.append(name)
    else:
      raise UserError(
        f'there is no split {name!r} (given: {spec!r}); '
        f'{closest(name, there)}; parts: {_PARTS}.'
      )
  return list(dict.fromkeys(names))


def kind(name: str) -> str | None:
  """Returns the key of `KINDS` for the name of a split, or None."""
  for key, names in KINDS.items():
    if name.lower() in names:
      return key
  return None


def of_file(path: str) -> str:
  """Returns the split of a file; '' if neither name nor folder specifies one.

  The split is the word train, validation, val or test in the name of the file,
  or else the name of its folder if that is one of these words.
  """
  folder, _, name = path.rpartition('/')
  if word := _WORD.search(name.lower()):
    return word[0]
  folder = folder.rpartition('/')[2]
  return folder if folder in NAMES else ''


def with_alias(found: dict[str, T], spec: str) -> dict[str, T]:
  """Adds the names by which a spec refers to splits that are named otherwise.

  For example, 'val' is added as a name of the split 'validation', and 'train'
  as one of 'Train', unless there are several splits of this kind (see `KINDS`).

  Args:
    found: {name of a split: value}.
    spec: requested split, 'train[:10%]+val'.

  Returns:
    {name of a split: value}, including the added names.
  """
  added = {}
  for name in re.findall(r'[A-Za-z]\w*', spec):
    same_kind = [n for n in found if kind(n) and kind(n) == kind(name)]
    if name not in found and len(same_kind) == 1:
      added[name] = found[same_kind[0]]
  return {**found, **added}


def resolve(spec: str, lengths: Mapping[str, int]) -> list[tuple[str, range]]:
  """Converts a spec to splits and ranges of their examples, rounded as in TFDS.

  Args:
    spec: split as in TFDS, 'train[:10%]+test[5:7]', or 'all'.
    lengths: {split: number of examples}.

  Raises:
    UserError: a split does not exist, the syntax is invalid, a range exceeds
      the split, or a range is empty.
  """
  named(spec, lengths)
  try:
    instruction = tfds.core.ReadInstruction.from_spec(spec)
    infos: Any = {
      name: SimpleNamespace(num_examples=n) for name, n in lengths.items()
    }
    absolute = instruction.to_absolute(infos)
  # AttributeError: the spec counts shards ('[:1shard]'), which `infos` lacks.
  except (ValueError, NotImplementedError, AttributeError) as error:
    raise bad_spec(spec, lengths) from error
  parts = [
    (part.splitname, range(lengths[part.splitname])[part.from_ : part.to])
    for part in absolute
  ]
  if not all(rows for _, rows in parts):
    raise bad_spec(spec, lengths)
  return parts


def bad_spec(spec: str, lengths: Mapping[str, int]) -> UserError:
  """Returns the error for a spec that cannot be resolved.

  Args:
    spec: split as the user wrote it, such as 'train[:99%]'.
    lengths: {split: number of examples}.
  """
  sizes = [f'{name} ({n} examples)' for name, n in lengths.items()]
  return UserError(
    f'the split {spec!r} is not valid or has a part without examples; there '
    f'are {", ".join(sizes)}; parts: {_PARTS}.'
  )


def by_name(names: np.ndarray) -> Int[np.ndarray, ' n']:
  """Returns the order of examples by the hashes of their names.

  Args:
    names: bytes `[n]`, without NUL.

  Returns:
    A permutation of 0 to n - 1.
  """
  return np.argsort(hashes(names), kind='stable')


def by_class(
  names: np.ndarray, classes: Int[np.ndarray, ' n']
) -> Int[np.ndarray, ' n']:
  """Returns an order in which every part has the same fraction of each class.

  The r-th of the n images of a class (r from 0, in the order of their hashes)
  is at the fraction r / n of the split. `[:90%]` and `[90%:]` therefore divide
  each class in this proportion, up to one image. A part that starts at 0 gets
  an image of every class before it gets a second one of any class, so that it
  contains the classes that are too small to be divided.

  Args:
    names: bytes `[n]`, without NUL.
    classes: class of each example, `[n]`.

  Returns:
    A permutation of 0 to n - 1.
  """
  hashed = hashes(names)
  # The last key of lexsort is the first that is compared.
  order = np.lexsort((hashed, classes))
  _, starts, counts = np.unique(
    classes[order], return_index=True, return_counts=True
  )
  rank_in_class = np.arange(len(names)) - np.repeat(starts, counts)
  fraction = np.empty(len(names))
  fraction[order] = rank_in_class / np.repeat(counts, counts)
  return np.lexsort((hashed, fraction))


def by_place(
  paths: Sequence[str],
  file: Int[np.ndarray, ' n'],
  place: Int[np.ndarray, ' n'],
) -> Int[np.ndarray, ' n']:
  """Returns the order of examples without names, by hashes of their positions.

  Args:
    paths: paths of the files; only the last part of each is used.
    file: index of the file of each example.
    place: position of each example in its file, a row or an offset.

  Returns:
    A permutation of 0 to n - 1.
  """
  hashed_files = hashes(base_names(paths))[file]
  hashed_places = mix(place.astype(np.uint64) + np.uint64(1))
  return np.argsort(mix(hashed_files ^ hashed_places), kind='stable')


def base_names(paths: Sequence[str]) -> np.ndarray:
  """Returns the last part of each path, as bytes `[n]`."""
  return np.array([os.fsencode(p.rpartition('/')[2]) for p in paths], np.bytes_)


def hashes(names: np.ndarray) -> UInt64[np.ndarray, ' n']:
  """Computes a hash of each name.

  The hash depends only on the bytes of the name, not on the array's width.

  Args:
    names: bytes `[n]`, without NUL.
  """
  if len(names) > _CHUNK:
    parts = np.array_split(names, math.ceil(len(names) / _CHUNK))
    return np.concatenate([hashes(part) for part in parts])
  # Names are padded with NUL to words of 8 bytes: uint64 [n, words].
  width = math.ceil(names.itemsize / 8) * 8
  words = names.astype(f'S{width}').view('<u8').reshape(len(names), -1)
  hashed = np.zeros(len(names), np.uint64)
  for column in words.T:
    # A word of zeros is padding after the name, and must not change the hash.
    hashed = np.where(column == 0, hashed, mix(hashed ^ column))
  return hashed
