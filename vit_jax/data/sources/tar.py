"""Tar shards in WebDataset's format: `key.jpg` with `key.cls` or `key.json`.

The positions of the members of each example (`data/storage/tarshard.py`) are
found once and cached (`data/storage/index.py`). The split of a shard is the
word train, validation, val or test in its name or in that of its folder
('imagenet-train-000123.tar', 'val/000.tar'); if no shard has one, everything is
'train'.
"""

import os
import re
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.config import plugins
from vit_jax.data import fingerprint
from vit_jax.data.storage import (
  classes,
  files,
  hash_order,
  index,
  splits,
  tarshard,
)
from vit_jax.errors import UserError

_BRACES = re.compile(r'\{([^{}]*)\}')
_JOKER = re.compile(r'[*?]')


class _Split(NamedTuple):
  """The examples of a split: a shard, a byte range and a label for each.

  Labels are bytes, as stored in the shards, until `_number` numbers them.
  """

  files: files.Files
  shard: np.ndarray
  offset: np.ndarray
  size: np.ndarray
  label: np.ndarray

  def cut_order(self) -> np.ndarray:
    return hash_order.by_place(self.files.paths, self.shard, self.offset)


@plugins.operational('path')
class Source(splits.Selected):
  """One split of tar shards, local or on gs://.

  Attributes:
    name: for messages, 'shards/train'.
    num_classes: lines of `class_map`; without it, as many as the largest label
      of the splits that are asked for needs.
    class_names: in the order of the labels.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    path: str,
    class_map: str | None = None,
    label_key: str = 'label',
    on_bad_shard: str = 'error',
  ):
    """Finds the shards and indexes those of the split, unless that is cached.

    Args:
      split: in the TFDS way: 'train', 'train[:99%]', 'train+validation'.
      path: path of the shards: a directory, whose .tar files are taken (also
        those in train/, val/ and test/ in it), or a pattern:
        'train-{000..009}.tar', '{train,val}-{00..09}.tar', 'train-*.tar'.
      class_map: a text file with a label on each line, a name or a number as
        the shards have it, in the order of the classes, and after a tab its
        name for people if there is one. Of names alone, numbers in the shards
        are the places, from 0. Needed where labels are names.
      label_key: key of the label in `.json` members; `.cls` members hold it
        alone.
      on_bad_shard: treatment of shards that were cut short: 'error', or 'skip'
        to take the complete examples before the cut.

    Raises:
      UserError: no shards, compressed ones, shards cut short, an example
        without image or label, or names as labels without `class_map`.
    """
    known = classes.load(class_map) if class_map else None
    shards = splits.with_alias(_by_split(_expand(path)), split)
    found = {
      name: _open(shards[name], label_key, on_bad_shard)
      for name in splits.named(split, shards)
    }
    lengths = {name: len(each.size) for name, each in found.items()}
    self._selection = splits.Selection(
      split, lengths, lambda name: found[name].cut_order()
    )
    known, self._splits = _number(found, known)
    self.name = f'{path}/{split}'
    self.num_classes = len(known.keys)
    self.class_names = known.names

  def __getitem__(self, index: int) -> dict[str, Any]:
    found, row = self._row(index)
    image = found.files.read(
      int(found.shard[row]), int(found.offset[row]), int(found.size[row])
    )
    return {'image': image, 'label': int(found.label[row])}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    chosen = []
    for split, rows in self._selection.rows():
      found = self._splits[split]
      columns = (found.shard, found.offset, found.size, found.label)
      names = hash_order.base_names(found.files.paths)
      chosen += [names, *(column[rows] for column in columns)]
    return fingerprint.sampled(self, *chosen)

  def where(self, index: int) -> str:
    """Returns the shard of an example and the image's offset in it."""
    found, row = self._row(index)
    return f'{found.files.paths[found.shard[row]]} @ {found.offset[row]}'

  def _row(self, index: int) -> tuple[_Split, int]:
    split, row = self._selection[index]
    return self._splits[split], row


def _expand(pattern: str) -> list[str]:
  """Returns the shards of a directory or a pattern."""
  pattern = files.place(pattern, 'source.path')
  braces = _BRACES.search(pattern)
  if braces:
    head, tail = pattern[: braces.start()], pattern[braces.end() :]
    return [
      path
      for choice in _choices(braces[1], pattern)
      for path in _expand(head + choice + tail)
    ]
  if _JOKER.search(pattern):
    ends = [pattern]
  elif pattern.endswith('.tar'):
    return [pattern]
  else:
    folders = ('', *(f'{name}/' for name in splits.NAMES))
    ends = [f'{pattern.rstrip("/")}/{folder}*.tar' for folder in folders]
  found = sorted(path for end in ends for path in _matching(end))
  if not found:
    raise UserError(
      f'source.path is {pattern!r}, but no .tar file matches it: set it '
      'to a directory of shards or a pattern such as train-{000..009}.tar or '
      'train-*.tar. Compressed shards (.tar.gz) cannot be read at random: '
      'gunzip them.'
    )
  return found


def _matching(pattern: str) -> list[str]:
  """Returns the shards that match a pattern with * or ?, local or remote."""
  folder = _JOKER.split(pattern, maxsplit=1)[0].rpartition('/')[0]
  name = pattern.removeprefix(f'{folder}/').replace('[', '[[]')
  return [
    os.fspath(path)
    for path in epath.Path(folder).glob(name)
    if path.name.endswith('.tar') and not path.name.startswith('.')
  ]


def _choices(text: str, pattern: str) -> list[str]:
  """'000..002' → 000, 001, 002; 'a,b' → a, b."""
  span = re.fullmatch(r'(\d+)\.\.(\d+)', text)
  if span and int(span[1]) <= int(span[2]):
    numbers = range(int(span[1]), int(span[2]) + 1)
    return [f'{number:0{len(span[1])}d}' for number in numbers]
  if ',' in text:
    return text.split(',')
  raise UserError(
    f'source.path is {pattern!r}, and {{{text}}} is not a range: allowed are '
    '{000..009}, the smaller number first, and {train,val}.'
  )


def _by_split(paths: list[str]) -> dict[str, list[str]]:
  """Returns the shards of each split, see `splits.of_file`."""
  found: dict[str, list[str]] = {}
  for path in paths:
    found.setdefault(splits.of_file(path), []).append(path)
  if '' in found and len(found) > 1:
    raise UserError(
      f'the shard {found[""][0]} has no split in its name, but others have: '
      'put train, validation or test into all names, or into none.'
    )
  return {name or 'train': shards for name, shards in found.items()}


def _open(paths: list[str], label_key: str, on_bad_shard: str) -> _Split:
  kind = 'tar2-' + re.sub(r'\W', '_', label_key)
  found = index.load(
    paths,
    kind,
    lambda path: tarshard.scan(path, label_key),
    on_bad_shard=on_bad_shard,
    remedy='Copy it again (or pack it again if several files were joined),',
  )
  return _Split(
    files.Files(paths),
    np.repeat(np.arange(len(paths), dtype=np.int32), found.counts),
    **found.columns,
  )


def _number(
  found: dict[str, _Split], known: classes.Classes | None
) -> tuple[classes.Classes, dict[str, _Split]]:
  """Returns the classes, and the splits with numbers as labels."""
  unique = {
    name: np.unique(each.label, return_inverse=True)
    for name, each in found.items()
  }
  texts = {
    os.fsdecode(label)
    for labels, _ in unique.values()
    for label in labels.tolist()
  }

  def where(text: str) -> str:
    for each in found.values():
      for row in np.flatnonzero(each.label == os.fsencode(text))[:1]:
        return f'{each.files.paths[each.shard[row]]} @ {each.offset[row]}'
    return ''

  known, numbers = classes.number(texts, where, known, whole=False)
  numbered = {}
  for name, (labels, inverse) in unique.items():
    lookup = [numbers[os.fsdecode(label)] for label in labels.tolist()]
    label = np.array(lookup, np.int64)[inverse]
    numbered[name] = found[name]._replace(label=label)
  return known, numbered
