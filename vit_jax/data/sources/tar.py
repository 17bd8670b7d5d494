"""Tar shards in WebDataset's format: `key.jpg` with `key.cls` or `key.json`.

Consecutive members whose names are equal up to the first dot after the last
slash are one example: an image, and its label as `.cls` or in `.json`. The
positions of the members are found once and cached (`data/storage/index.py`).
The split of a shard is the word train, validation, val or test in its name or
in that of its folder ('imagenet-train-000123.tar', 'val/000.tar'); if no shard
has one, everything is 'train'.
"""

import json
import os
import re
import tarfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int

from vit_jax.config import schema
from vit_jax.data import fingerprint, progress
from vit_jax.data.storage import class_folders, files, index, splits
from vit_jax.errors import UserError

_BLOCK = 512  # bytes of a tar header
_CHUNK = 2**20  # bytes that are read at once after the last member
_BOM = b'\xef\xbb\xbf'
# {000..009} or {train,val}
_BRACES = re.compile(r'\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}')
_WILDCARD = re.compile(r'[*?]')


def scan(
  path: str, label_key: str | None, others: Sequence[str] = ()
) -> index.Scan:
  """Finds image and label of each example of a shard.

  Args:
    path: path of the shard.
    label_key: key of the label in `.json` members; None for images without
      labels.
    others: endings of further members that every example has, without the first
      dot: 'txt', 'seg.png'.

  Returns:
    Columns `offset` (int64) and `size` (uint32) of the image, in bytes, and
    `label`, text as bytes; with `others`, the first two are `[n, 1 + others]`.

  Raises:
    UserError: the shard is compressed; or an example has no image, no label,
      two members with the same ending, or a link.
  """
  examples: list[tuple[list[int], list[int], bytes]] = []
  group: list[tarfile.TarInfo] = []  # members of the current example
  with epath.Path(path).open('rb') as file:
    if file.read(2) == b'\x1f\x8b':  # gzip
      raise UserError(
        f'{path} is compressed and has no random access: gunzip it.'
      )
    file.seek(0)
    try:
      with tarfile.open(fileobj=file, mode='r:') as tar:
        for member in iter(tar.next, None):
          progress.made()
          # tarfile would otherwise keep all members in memory.
          tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
          if member.isdir() or _name(member).startswith('.'):
            continue
          if group and _key(member) != _key(group[0]):
            examples.append(_example(path, file, group, label_key, others))
            group = []
          group.append(member)
        file.seek(tar.offset)
        is_whole = _only_zeros_follow(file)
        if is_whole and group:
          examples.append(_example(path, file, group, label_key, others))
    except tarfile.ReadError:
      is_whole = False
  if is_whole:
    cut = index.WHOLE
  else:  # the last example may lack members
    cut = group[0].offset if group else 0
  count = len(examples)
  shape = (count, 1 + len(others)) if others else count
  columns = {
    'offset': np.array([x[0] for x in examples], np.int64).reshape(shape),
    'size': np.array([x[1] for x in examples], np.uint32).reshape(shape),
    'label': np.array([x[2] for x in examples], np.bytes_),
  }
  return index.Scan(columns, cut)


def _only_zeros_follow(file: Any) -> bool:
  """Returns whether the rest of a file is at least one block of zeros.

  tarfile stops at the first block of zeros, even if more members follow because
  shards were joined (`cat a.tar b.tar`) or a part was not written.
  """
  chunk = file.read(_BLOCK)
  is_block = len(chunk) == _BLOCK
  while chunk:
    if chunk.strip(b'\0'):
      return False
    chunk = file.read(_CHUNK)
  return is_block


def _name(member: tarfile.TarInfo) -> str:
  """Returns the file name of a member, without its folder."""
  return member.name.rpartition('/')[2]


def _key(member: tarfile.TarInfo) -> str:
  """Returns the path of a member up to the first dot of its file name."""
  folder, slash, name = member.name.rpartition('/')
  return folder + slash + name.partition('.')[0]


def _example(
  path: str,
  file: Any,
  group: list[tarfile.TarInfo],
  label_key: str | None,
  others: Sequence[str],
) -> tuple[list[int], list[int], bytes]:
  """Returns (offsets, sizes, label) of an example.

  Args:
    path: path of the shard, for messages.
    file: the open shard, from which labels are read.
    group: members of the example.
    label_key: see `scan`.
    others: see `scan`.

  Returns:
    Offsets and sizes, in bytes, of the image and then of the others; and the
    label.

  Raises:
    UserError: the members are not one image, its label and the others, or one
      of them is a link.
  """
  for member in group:
    if not member.isreg() or member.issparse():
      raise UserError(
        f'{path}: {member.name} @ {member.offset} is a link or a sparse file, '
        'without bytes of its own: write the shard again with the file itself.'
      )
  by_ending = {f'.{_name(m).partition(".")[2].lower()}': m for m in group}
  images = [by_ending[end] for end in by_ending if end in files.IMAGES]
  more = [by_ending[f'.{end}'] for end in others if f'.{end}' in by_ending]
  label = _label(file, by_ending, label_key)
  if (
    len(by_ending) < len(group)  # two members have the same ending
    or len(images) != 1
    or len(more) != len(others)
    or label is None
  ):
    members = ', '.join(f'{each.name} @ {each.offset}' for each in group)
    raise UserError(
      f'{path}: the example {_key(group[0])!r} has the members {members}; it '
      f'must have one image ({" ".join(files.IMAGES)}), the members '
      f'source.others={tuple(others)}, and a label, an integer or a name, as '
      f'.cls or as {label_key!r} in .json (without labels: '
      '--config.source.label_key=None).'
    )
  used = images + more
  return (
    [each.offset_data for each in used],
    [each.size for each in used],
    label,
  )


def _label(
  file: Any, by_ending: dict[str, tarfile.TarInfo], label_key: str | None
) -> bytes | None:
  """Returns the label in `.cls` or `.json`; None if there is no valid one.

  Images without labels (`label_key` is None) have the label b''.
  """
  if label_key is None:
    return b''
  member = by_ending.get('.cls', by_ending.get('.json'))
  if member is None:
    return None
  file.seek(member.offset_data)
  content = file.read(member.size).removeprefix(_BOM)
  if '.cls' in by_ending:
    return content.strip() or None
  try:
    text = class_folders.text_of(json.loads(content)[label_key])
    return text.encode() if text else None
  except (ValueError, KeyError, TypeError, RecursionError):
    return None


class _Split(NamedTuple):
  """The examples of a split.

  Attributes:
    files: shards.
    shard: index of the shard of each example, `[n]`.
    offset: offset of each example's image in its shard, bytes, `[n]`; with
      further members, of the image and of these, `[n, 1 + others]`.
    size: their sizes, bytes, in the same shape.
    label: label of each example, `[n]`: bytes as in the shard, and int64 after
      `Source._number_labels`.
  """

  files: files.Files
  shard: np.ndarray
  offset: np.ndarray
  size: np.ndarray
  label: np.ndarray

  def where(self, row: int) -> str:
    """Returns the shard of an example and the image's offset in it."""
    offset = np.atleast_1d(self.offset[row])[0]
    return f'{self.files.paths[self.shard[row]]} @ {offset}'


@schema.operational('path', 'class_map')
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
    others: tuple[str, ...] = (),
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
        not used, except `others`.
      others: endings of further members, which the examples contain as bytes:
        'txt', 'seg.png'.
      on_bad_shard: treatment of shards that were cut short: 'error', or 'skip'
        to use the complete examples before the cut.

    Raises:
      UserError: there are no shards; a shard is compressed or cut short; an
        example has no image or no label; or labels are names and there is no
        `class_map`.
    """
    listed = class_folders.load(class_map) if class_map else None
    self._others = others
    shards = splits.with_alias(_by_split(_expand(path)), split)
    self._splits = {
      name: _open(shards[name], label_key, others, on_bad_shard)
      for name in splits.named(split, shards)
    }
    lengths = {name: len(part.size) for name, part in self._splits.items()}
    splits.resolve(split, lengths)  # refuses empty splits, without labels
    classes = self._number_labels(listed)
    self.name = f'{path}/{split}'
    self.num_classes, self.class_names = len(classes.keys), classes.names
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def __getitem__(self, index: int) -> dict[str, Any]:
    part, row = self._row(index)
    shard = int(part.shard[row])
    example = {}
    for name, offset, size in zip(
      ('image', *self._others),
      np.atleast_1d(part.offset[row]).tolist(),
      np.atleast_1d(part.size[row]).tolist(),
      strict=True,
    ):
      example[name] = part.files.read(shard, offset, size)
    return example | {'label': int(part.label[row])}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    chosen = []
    for split, rows in self._selection.rows():
      part = self._splits[split]
      columns = (part.shard, part.offset, part.size, part.label)
      names = splits.base_names(part.files.paths)
      chosen += [names, *(column[rows] for column in columns)]
    return fingerprint.sampled(self, *chosen)

  def where(self, index: int) -> str:
    """Returns the shard of an example and the image's offset in it."""
    part, row = self._row(index)
    return part.where(row)

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples; 0 if the source has no labels."""
    labels = {name: part.label for name, part in self._splits.items()}
    return self._selection.gather(labels)

  def _cut_order(self, split: str) -> np.ndarray:
    part = self._splits[split]
    image_offset = part.offset.reshape(len(part.shard), -1)[:, 0]
    return splits.by_place(part.files.paths, part.shard, image_offset)

  def _row(self, index: int) -> tuple[_Split, int]:
    """Returns the split of an example, and its row in the split's columns."""
    split, row = self._selection[index]
    return self._splits[split], row

  def _number_labels(
    self, listed: class_folders.Classes | None
  ) -> class_folders.Classes:
    """Replaces labels as text by class indices, and returns the classes.

    Args:
      listed: list of classes, if there is one.

    Raises:
      UserError: see `class_folders.number`.
    """
    places: dict[str, str] = {}  # where each label occurs first
    unique = {}  # of each split: distinct labels, and their index in each row
    for name, part in self._splits.items():
      encoded, rows, inverse = np.unique(
        part.label, return_index=True, return_inverse=True
      )
      texts = [os.fsdecode(text) for text in encoded.tolist()]
      for text, row in zip(texts, rows.tolist(), strict=True):
        places.setdefault(text, part.where(row))
      unique[name] = texts, inverse
    classes, numbers = class_folders.number(
      places, places.__getitem__, listed, whole=False
    )
    for name, (texts, inverse) in unique.items():
      labels = np.array([numbers[text] for text in texts], np.int64)
      self._splits[name] = self._splits[name]._replace(label=labels[inverse])
    return classes


def _expand(pattern: str) -> list[str]:
  """Returns the shards of a directory or a pattern.

  Raises:
    UserError: no shard matches.
  """
  shards = []
  for path in _without_braces(files.expanded(pattern)):
    if _WILDCARD.search(path):
      shards += _matching(path)
    elif path.endswith('.tar'):
      shards.append(path)
    else:  # a directory
      folders = ['', *(f'{name}/' for name in splits.NAMES)]
      root = path.rstrip('/')
      shards += sorted(
        shard
        for folder in folders
        for shard in _matching(f'{root}/{folder}*.tar')
      )
  if not shards:
    raise UserError(
      f'source.path is {pattern!r}, but no .tar file matches it; give a folder '
      'or a pattern: train-{000..009}.tar (the smaller number first), '
      '{train,val}.tar or train-*.tar; gunzip compressed shards (.tar.gz).'
    )
  return shards


def _without_braces(pattern: str) -> list[str]:
  """Replaces the first braces, {000..009} or {train,val}, by each choice."""
  braces = _BRACES.search(pattern)
  if braces is None:
    return [pattern]
  first, last, names = braces.groups()
  if names:
    choices = names.split(',')
  else:
    numbers = range(int(first), int(last) + 1)
    choices = [f'{number:0{len(first)}d}' for number in numbers]
  return [
    path
    for choice in choices
    for path in _without_braces(pattern.replace(braces[0], choice, 1))
  ]


def _matching(pattern: str) -> list[str]:
  """Returns the sorted shards that match * or ?, local or remote."""
  # The longest folder without a wildcard: 'a/' for 'a/b*/c.tar'.
  length = _WILDCARD.split(pattern, maxsplit=1)[0].rfind('/') + 1
  folder, name = pattern[:length], pattern[length:]
  return sorted(
    os.fspath(path)
    # Only * and ? are wildcards: brackets in a name are literal characters.
    for path in epath.Path(folder).glob(name.replace('[', '[[]'))
    if path.name.endswith('.tar') and not path.name.startswith('.')
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


def _open(
  paths: list[str],
  label_key: str | None,
  others: Sequence[str],
  on_bad_shard: str,
) -> _Split:
  """Loads or builds the index of the shards of a split."""
  settings = json.dumps([label_key, *others]).encode()
  # The number is that of the format of the columns.
  kind = f'tar3-{zlib.crc32(settings):08x}'
  shards = index.load(
    paths,
    kind,
    lambda path: scan(path, label_key, others),
    on_bad_shard=on_bad_shard,
  )
  return _Split(
    files.Files(paths),
    np.repeat(np.arange(len(paths), dtype=np.int32), shards.counts),
    **shards.columns,
  )
