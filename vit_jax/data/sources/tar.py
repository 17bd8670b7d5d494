"""Tar shards in the WebDataset way: `key.jpg` with `key.cls` or `key.json`.

Members whose names agree up to the first dot of the last part are one example,
and stand one after another. Their places are found once and cached
(`data/index.py`). A shard's split is the word train, validation, val or test in
its name or its folder's ('imagenet-train-000123.tar', 'val/000.tar'); where no
shard has one, everything is 'train'.
"""

import glob
import json
import os
import re
import tarfile
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.data import classes, cuts, files, fingerprint, index, splits
from vit_jax.errors import UserError

_BRACES = re.compile(r'\{([^{}]*)\}')
_WORD = re.compile(rf'(?<![a-z])({"|".join(splits.NAMES)})(?![a-z])')
_BLOCK = 512  # bytes of a tar header


class _Split(NamedTuple):
  """The examples of a split: a shard, a byte range and a label for each."""

  files: files.Files
  shard: np.ndarray
  offset: np.ndarray
  size: np.ndarray
  label: np.ndarray

  def cut_order(self) -> np.ndarray:
    return cuts.by_place(self.files.paths, self.shard, self.offset)


class Source:
  """One split of tar shards, local or on gs://.

  Attributes:
    name: for messages, 'shards/train'.
    num_classes: lines of `class_map`; without it, as many as the largest label
      of the split needs.
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
      path: of the shards: a directory, whose .tar files are taken (also those
        in train/, val/ and test/ in it), or a pattern: 'train-{000..009}.tar',
        '{train,val}-{00..09}.tar'.
      class_map: a text file with a class on each line, in the order of the
        labels, and after a tab its name for people if there is one; needed
        where labels are names.
      label_key: of the label in `.json` members; `.cls` members hold it alone.
      on_bad_shard: of shards that were cut short: 'error', or 'skip' to take
        the complete examples before the cut.

    Raises:
      UserError: no shards, compressed ones, shards cut short, an example
        without image or label, or names as labels without `class_map`.
    """
    known = classes.load(class_map) if class_map else None
    shards = splits.with_alias(_by_split(_expand(path)), split)
    self._splits = {
      name: _open(shards[name], label_key, known, on_bad_shard)
      for name in splits.named(split, shards)
    }
    lengths = {name: len(each.label) for name, each in self._splits.items()}
    self._selection = splits.Selection(
      split, lengths, lambda name: self._splits[name].cut_order()
    )
    largest = max(int(each.label.max()) for each in self._splits.values())
    known = classes.numbered(largest, known, path)
    self.name = f'{path}/{split}'
    self.num_classes = len(known.keys)
    self.class_names = known.names

  def __len__(self) -> int:
    return len(self._selection)

  def __getitem__(self, index: int) -> dict[str, Any]:
    found, row = self._row(index)
    image = found.files.read(
      int(found.shard[row]), int(found.offset[row]), int(found.size[row])
    )
    return {'image': image, 'label': int(found.label[row])}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """By what the data set is known again; see `data.fingerprint`."""
    chosen = []
    for split, rows in self._selection.rows():
      found = self._splits[split]
      columns = (found.shard, found.offset, found.size, found.label)
      names = cuts.base_names(found.files.paths)
      chosen += [names, *(column[rows] for column in columns)]
    return fingerprint.sampled(self, *chosen)

  def where(self, index: int) -> str:
    """The shard of an example and the image's offset there."""
    found, row = self._row(index)
    return f'{found.files.paths[found.shard[row]]} @ {found.offset[row]}'

  def _row(self, index: int) -> tuple[_Split, int]:
    split, row = self._selection[index]
    return self._splits[split], row


def _expand(pattern: str) -> list[str]:
  """The shards that a directory or a pattern stands for."""
  if not files.is_remote(pattern):
    pattern = os.path.expanduser(pattern)
  braces = _BRACES.search(pattern)
  if braces:
    head, tail = pattern[: braces.start()], pattern[braces.end() :]
    return [
      path
      for choice in _choices(braces[1], pattern)
      for path in _expand(head + choice + tail)
    ]
  if pattern.endswith('.tar'):
    return [pattern]
  ends = ('*.tar', *(f'{name}/*.tar' for name in splits.NAMES))
  if files.is_remote(pattern):
    found = [os.fspath(p) for e in ends for p in epath.Path(pattern).glob(e)]
  else:
    base = glob.escape(pattern.rstrip('/'))
    found = [path for end in ends for path in glob.glob(f'{base}/{end}')]
  if not found:
    raise UserError(
      f'source.path is {pattern!r}, where no .tar file is found: give a '
      'directory of shards or a pattern such as train-{000..009}.tar. '
      'Compressed shards (.tar.gz) have no random access: gunzip them.'
    )
  return sorted(found)


def _choices(text: str, pattern: str) -> list[str]:
  """'000..002' → 000, 001, 002; 'a,b' → a, b."""
  span = re.fullmatch(r'(\d+)\.\.(\d+)', text)
  if span and int(span[1]) <= int(span[2]):
    numbers = range(int(span[1]), int(span[2]) + 1)
    return [f'{number:0{len(span[1])}d}' for number in numbers]
  if ',' in text:
    return text.split(',')
  raise UserError(
    f'source.path is {pattern!r}, and {{{text}}} is no range: allowed are '
    '{000..009}, the smaller number first, and {train,val}.'
  )


def _by_split(paths: list[str]) -> dict[str, list[str]]:
  """Shards by the split that their names speak of."""
  found: dict[str, list[str]] = {}
  for path in paths:
    folder, name = path.split('/')[-2:] if '/' in path else ('', path)
    words = _WORD.findall(name.lower())
    words = words or [folder] * (folder in splits.NAMES)
    found.setdefault(words[0] if words else '', []).append(path)
  if '' in found and len(found) > 1:
    raise UserError(
      f'the shard {found[""][0]} names no split, and others do: put train, '
      'validation or test into all names, or into none.'
    )
  return {name or 'train': shards for name, shards in found.items()}


def _open(
  paths: list[str],
  label_key: str,
  known: classes.Classes | None,
  on_bad_shard: str,
) -> _Split:
  kind = 'tar-' + re.sub(r'\W', '_', label_key)
  found = index.load(
    paths,
    kind,
    lambda path: _scan(path, label_key),
    on_bad_shard=on_bad_shard,
  )
  counts = [len(columns['offset']) for columns in found.shards]
  shard, offset, size, text = (
    np.repeat(np.arange(len(paths), dtype=np.int32), counts),
    *(
      np.concatenate([columns[name] for columns in found.shards])
      for name in ('offset', 'size', 'label')
    ),
  )
  values, inverse = np.unique(text, return_inverse=True)
  names = [os.fsdecode(value) for value in values.tolist()]
  numeric = all(name.isdecimal() for name in names)
  if not numeric and known is None:
    name = next(name for name in names if not name.isdecimal())
    raise UserError(
      f'{paths[0]} has labels that are names ({name!r}): list them in the '
      'order of their numbers in a file, and give it as '
      '--config.source.class_map.'
    )
  numbers = [
    int(name) if numeric or known is None else known.label(name, paths[0])
    for name in names
  ]
  label = np.array(numbers, np.int64)[inverse]
  return _Split(files.Files(paths), shard, offset, size, label)


def _scan(path: str, label_key: str) -> index.Scan:
  """Finds image and label of each example of a shard."""
  rows: list[tuple[int, int, bytes]] = []
  group: list[tarfile.TarInfo] = []
  with epath.Path(path).open('rb') as file:
    if file.read(2) == b'\x1f\x8b':
      raise UserError(
        f'{path} is compressed, which leaves no random access: gunzip it.'
      )
    file.seek(0)
    try:
      with tarfile.open(fileobj=file, mode='r:') as tar:
        for member in iter(tar.next, None):
          tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
          if not member.isreg() or _name(member).startswith('.'):
            continue
          if group and _key(member) != _key(group[0]):
            rows.append(_example(path, file, group, label_key))
            group = []
          group.append(member)
        file.seek(tar.offset)
        whole = file.read(_BLOCK) == bytes(_BLOCK)  # the end has a mark
        if whole and group:
          rows.append(_example(path, file, group, label_key))
    except tarfile.ReadError:
      whole = False
  cut = index.WHOLE if whole else group[0].offset if group else 0
  offset, size, label = zip(*rows, strict=True) if rows else ((), (), ())
  columns = {
    'offset': np.array(offset, np.int64),
    'size': np.array(size, np.uint32),
    'label': np.array(label, np.bytes_),
  }
  return index.Scan(columns, cut)


def _name(member: tarfile.TarInfo) -> str:
  return member.name.rpartition('/')[2]


def _key(member: tarfile.TarInfo) -> str:
  folder, slash, name = member.name.rpartition('/')
  return folder + slash + name.partition('.')[0]


def _example(
  path: str, file: Any, group: list[tarfile.TarInfo], label_key: str
) -> tuple[int, int, bytes]:
  """(offset, size, label) of an example's members."""

  def content(member: tarfile.TarInfo) -> bytes:
    file.seek(member.offset_data)
    return file.read(member.size)

  parts = {'.' + _name(m).partition('.')[2].lower(): m for m in group}
  images = [part for end, part in parts.items() if end in files.IMAGES]
  text = None
  if '.cls' in parts:
    text = content(parts['.cls']).strip()
  elif '.json' in parts:
    try:
      found = json.loads(content(parts['.json']))
      text = str(found[label_key]).encode()
    except (ValueError, KeyError, TypeError):
      text = None
  if len(images) != 1 or not text:
    raise UserError(
      f'{path}: the example {_key(group[0])!r} has the members '
      f'{", ".join(parts)}; it must have one image ({" ".join(files.IMAGES)}) '
      f'and its label as .cls or as {label_key!r} in .json.'
    )
  return images[0].offset_data, images[0].size, text
