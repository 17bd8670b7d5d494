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
from jaxtyping import Int

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
_WILDCARD = re.compile(r'[*?]')


class _Split(NamedTuple):
  """The examples of a split.

  Attributes:
    files: shards.
    shard: index of the shard of each example.
    offset: offset of each example's image in its shard, bytes.
    size: size of each example's image, bytes.
    label: label of each example: bytes as in the shard, int64 after `_number`.
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
    name: name for messages, such as 'shards/train'.
    num_classes: number of lines of `class_map`; without it, one more than the
      largest label in the opened splits.
    class_names: names of the classes, in the order of the labels.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    path: str,
    class_map: str | None = None,
    label_key: str | None = 'label',
    on_bad_shard: str = 'error',
  ):
    """Finds the shards, and loads or builds the index of those of the split.

    Args:
      split: split as in TFDS: 'train', 'train[:99%]', 'train+validation'.
      path: path of the shards: a directory, whose .tar files are read (also
        those in its folders train/, val/ and test/), or a pattern:
        'train-{000..009}.tar', '{train,val}-{00..09}.tar', 'train-*.tar'.
      class_map: text file with one class per line, written like the labels in
        the shards (a name or a number), in the order of the classes; a display
        name may follow after a tab. If it contains only names, numbers in the
        shards are positions in it, from 0. It is required if labels are names.
      label_key: key of the label in `.json` members; a `.cls` member contains
        only the label. None for images without labels; other members are then
        not used.
      on_bad_shard: treatment of shards that were cut short: 'error', or 'skip'
        to use the complete examples before the cut.

    Raises:
      UserError: there are no shards; a shard is compressed or cut short; an
        example has no image or no label; or labels are names and there is no
        `class_map`.
    """
    listed = classes.load(class_map) if class_map else None
    shards = splits.with_alias(_by_split(_expand(path)), split)
    opened = {
      name: _open(shards[name], label_key, on_bad_shard)
      for name in splits.named(split, shards)
    }
    lengths = {name: len(each.size) for name, each in opened.items()}
    self._selection = splits.Selection(
      split, lengths, lambda name: opened[name].cut_order()
    )
    all_classes, self._splits = _number(opened, listed)
    self.name = f'{path}/{split}'
    self.num_classes = len(all_classes.keys)
    self.class_names = all_classes.names

  def __getitem__(self, index: int) -> dict[str, Any]:
    part, row = self._row(index)
    image = part.files.read(
      int(part.shard[row]), int(part.offset[row]), int(part.size[row])
    )
    return {'image': image, 'label': int(part.label[row])}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    chosen = []
    for split, rows in self._selection.rows():
      part = self._splits[split]
      columns = (part.shard, part.offset, part.size, part.label)
      names = hash_order.base_names(part.files.paths)
      chosen += [names, *(column[rows] for column in columns)]
    return fingerprint.sampled(self, *chosen)

  def where(self, index: int) -> str:
    """Returns the shard of an example and the image's offset in it."""
    part, row = self._row(index)
    return f'{part.files.paths[part.shard[row]]} @ {part.offset[row]}'

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples."""
    parts = self._selection.rows()
    return np.concatenate(
      [self._splits[split].label[rows] for split, rows in parts]
    )

  def _row(self, index: int) -> tuple[_Split, int]:
    split, row = self._selection[index]
    return self._splits[split], row


def _expand(pattern: str) -> list[str]:
  """Returns the shards of a directory or a pattern.

  Raises:
    UserError: no shard matches.
  """
  pattern = files.place(pattern, 'source.path')
  braces = _BRACES.search(pattern)
  if braces:
    head, tail = pattern[: braces.start()], pattern[braces.end() :]
    return [
      path
      for choice in _choices(braces[1], pattern)
      for path in _expand(head + choice + tail)
    ]
  if _WILDCARD.search(pattern):
    patterns = [pattern]
  elif pattern.endswith('.tar'):
    return [pattern]
  else:
    folders = ('', *(f'{name}/' for name in splits.NAMES))
    patterns = [f'{pattern.rstrip("/")}/{folder}*.tar' for folder in folders]
  shards = sorted(path for each in patterns for path in _matching(each))
  if not shards:
    raise UserError(
      f'source.path is {pattern!r}, but no .tar file matches it: set it '
      'to a directory of shards or a pattern such as train-{000..009}.tar or '
      'train-*.tar. Compressed shards (.tar.gz) do not have random access: '
      'gunzip them.'
    )
  return shards


def _matching(pattern: str) -> list[str]:
  """Returns the shards that match a pattern with * or ?, local or remote."""
  folder = _WILDCARD.split(pattern, maxsplit=1)[0].rpartition('/')[0]
  # Only * and ? are wildcards: brackets in a name are literal characters.
  name = pattern.removeprefix(f'{folder}/').replace('[', '[[]')
  return [
    os.fspath(path)
    for path in epath.Path(folder).glob(name)
    if path.name.endswith('.tar') and not path.name.startswith('.')
  ]


def _choices(text: str, pattern: str) -> list[str]:
  """Returns the alternatives in braces: 000, 001 of '000..001'; a, b of 'a,b'.

  Raises:
    UserError: the text is neither a range nor a list.
  """
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
  """Returns the shards of each split, see `splits.of_file`.

  Raises:
    UserError: some names specify a split, and others do not.
  """
  by_split: dict[str, list[str]] = {}
  for path in paths:
    by_split.setdefault(splits.of_file(path), []).append(path)
  if '' in by_split and len(by_split) > 1:
    raise UserError(
      f'the shard {by_split[""][0]} has no split in its name, but others have: '
      'put train, validation or test into all names, or into none.'
    )
  return {name or 'train': shards for name, shards in by_split.items()}


def _open(paths: list[str], label_key: str | None, on_bad_shard: str) -> _Split:
  """Loads or builds the index of the shards of a split."""
  kind = 'tar2-' + re.sub(r'\W', '_', label_key or '')
  shards = index.load(
    paths,
    kind,
    lambda path: tarshard.scan(path, label_key),
    on_bad_shard=on_bad_shard,
    remedy='Copy it again (or pack it again if several files were joined),',
  )
  return _Split(
    files.Files(paths),
    np.repeat(np.arange(len(paths), dtype=np.int32), shards.counts),
    **shards.columns,
  )


def _number(
  parts: dict[str, _Split], listed: classes.Classes | None
) -> tuple[classes.Classes, dict[str, _Split]]:
  """Returns the classes, and the splits with class indices as labels."""
  unique = {
    name: np.unique(part.label, return_inverse=True)
    for name, part in parts.items()
  }
  texts = {
    os.fsdecode(label)
    for labels, _ in unique.values()
    for label in labels.tolist()
  }

  def where(text: str) -> str:
    for part in parts.values():
      for row in np.flatnonzero(part.label == os.fsencode(text))[:1]:
        return f'{part.files.paths[part.shard[row]]} @ {part.offset[row]}'
    return ''

  if texts == {''}:
    all_classes, numbers = classes.of_unlabelled(''), {'': 0}
  else:
    all_classes, numbers = classes.number(texts, where, listed, whole=False)
  numbered = {}
  for name, (labels, inverse) in unique.items():
    lookup = [numbers[os.fsdecode(label)] for label in labels.tolist()]
    label = np.array(lookup, np.int64)[inverse]
    numbered[name] = parts[name]._replace(label=label)
  return all_classes, numbered
