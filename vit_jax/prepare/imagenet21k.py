"""`imagenet21k`: the public ImageNet-21k archives as a TFDS data set.

TFDS does not provide it. There is one split, `train`, ordered by a hash of the
file names, so that every part of it is a random sample; `train[:51200]` is used
for validation. Files are kept unchanged. Files that training could not decode
are left out and listed in undecodable.txt.

Classes are synsets in the order of their WordNet names: label k is the k-th
synset of the archive. The usual head has 21,843 outputs: the 21,841 synsets of
the fall 2011 archive and two more, in the same order. Without a class list, its
last outputs stay unused. A class list (one line per output, which starts with
the synset) gives the labels of an official head instead.

The data set is built in two passes of independent parts; finished parts are not
repeated. The first pass reads every synset, checks every image and writes the
records of about 500 MB of the archive, ordered by hash, to one file. The second
pass writes shards: a shard is an interval of hashes, and therefore consecutive
records of every file. A single pass would leave each class in few shards, so
that the first images of the split would lack classes. In addition to the
archive, this needs disk space of twice its size, half of it only temporarily.

`fall11_whole.tar` contains n00004475.tar, n00005787.tar, …, and
`winter21_whole.tar.gz` contains winter21_whole/n00005787.tar, …; a directory of
such tar files is also accepted. Each of them contains n00004475_15899.JPEG, ….
No file is extracted: members are read into memory. Their names are used only to
determine the class, and as a text feature.
"""

import collections
import functools
import gzip
import io
import logging
import pathlib
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from array_record.python.array_record_module import (  # pyright: ignore
  ArrayRecordReader,
)
from jaxtyping import Int

from vit_jax.data import progress
from vit_jax.errors import UserError
from vit_jax.prepare import shards
from vit_jax.prepare.shards import Skipped

log = logging.getLogger('vit_jax')
NAME = 'imagenet21k'
PART_BYTES = 2**29  # bytes of the archive that a worker reads into memory
_VALIDATION = 51_200  # images held out by configs/l16_i21k.py
_DESCRIPTION = (
  'ImageNet-21k: every image of the public archive that can be decoded, by '
  'synset, in random order.'
)
_SYNSET = re.compile(r'(?:[^/]*/)*(n\d{8})\.tar')
_GZIP = b'\x1f\x8b'  # first bytes of a compressed archive
_BLOCK = 512  # bytes of a block of the tar format


def prepare(
  source: pathlib.Path,
  data_dir: pathlib.Path,
  *,
  class_list: pathlib.Path | None = None,
  workers: int = 1,
  part_bytes: int = PART_BYTES,
  shard_bytes: int = shards.SHARD_BYTES,
) -> None:
  """Builds the data set in data_dir/imagenet21k/1.0.0, or continues it.

  Args:
    source: path of the archive; see `synsets`.
    data_dir: TFDS directory.
    class_list: file of synsets in the order of labels.
    workers: number of processes.
    part_bytes: bytes of the archive per part.
    shard_bytes: approximate size of one shard of the result.

  Raises:
    UserError: the source or the class list cannot be used, or the disk is too
      small.
    OSError: a file cannot be read or written.
  """
  listed = _class_list(class_list) if class_list else None
  next(synsets(source))  # raises if the source cannot be used
  with shards.locked(data_dir, NAME) as work:
    shards.require_space(work, 2 * num_bytes(source))
    parts = _read(source, work / 'parts', part_bytes, workers)
    names = _class_names(parts, listed)
    notes = _write(work, parts, names, shard_bytes, workers)
    skipped = [item for part in parts for item in part['skipped']]
    num_images = shards.finish(work, NAME, notes, names, _DESCRIPTION, skipped)
  if num_images > _VALIDATION:
    log.info(
      'to train on it: python -m vit_jax.train --config=configs/l16_i21k.py '
      '--config.source.data_dir=%s --config.train.num_examples=%d',
      data_dir,
      num_images - _VALIDATION,
    )


class Synset(NamedTuple):
  """The tar file of one synset: a range of a file, or bytes in memory.

  Attributes:
    wnid: WordNet name of the class, for example 'n00004475'.
    path: path of the file that contains it.
    offset: position in that file, in bytes.
    size: length in bytes.
    data: content, if the source is compressed and can only be read in order.
  """

  wnid: str
  path: str
  offset: int
  size: int
  data: bytes | None = None

  def read(self) -> bytes:
    """Reads the bytes of the tar file.

    Raises:
      OSError: the file cannot be read.
    """
    if self.data is not None:
      return self.data
    with open(self.path, 'rb') as file:
      file.seek(self.offset)
      return file.read(self.size)


def synsets(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of a source, in the order of the source.

  Args:
    source: archive, or directory of tar files.

  Raises:
    UserError: the file does not exist, is another archive, or is truncated.
  """
  count = 0
  try:
    for synset in _synsets(source):
      count += 1
      yield synset
    if not count:
      raise EOFError('it contains no nXXXXXXXX.tar')
  except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
    raise UserError(
      f'--source={source} is not a complete archive ({error}); {count} synsets '
      'were read. Give the whole fall11_whole.tar or winter21_whole.tar.gz of '
      'image-net.org, or a directory of its nXXXXXXXX.tar files.'
    ) from error


def _synsets(source: pathlib.Path) -> Iterator[Synset]:
  """Yields synsets; reads only the headers if the source is not compressed."""
  if source.is_dir():
    for path in _files(source):
      yield Synset(path.stem, str(path), 0, path.stat().st_size)
    return
  with source.open('rb') as file:
    compressed = file.read(2) == _GZIP
  mode = 'r|' if compressed else 'r:'
  with (
    gzip.open(source) if compressed else source.open('rb') as file,
    tarfile.open(fileobj=file, mode=mode, bufsize=2**20) as tar,
  ):
    for member in tar:
      match, data = _SYNSET.fullmatch(member.name), None
      if match and member.isreg():
        if compressed:
          data = _content(tar, member)
        offset = member.offset_data
        yield Synset(match[1], str(source), offset, member.size, data)
    if compressed:
      while file.read(2**20):  # gzip compares the checksum at the end
        pass
    else:
      _check_end(file, tar.offset)


def _files(source: pathlib.Path) -> list[pathlib.Path]:
  """Returns the archive, or the sorted tar files of synsets in a directory."""
  if not source.is_dir():
    return [source]
  return [p for p in sorted(source.iterdir()) if _SYNSET.fullmatch(p.name)]


def num_bytes(source: pathlib.Path) -> int:
  """Returns the size of a source in bytes."""
  return sum(path.stat().st_size for path in _files(source))


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
  content = tar.extractfile(member)
  assert content is not None  # a regular file
  return content.read()


def _check_end(file: IO[bytes] | gzip.GzipFile, offset: int) -> None:
  """Checks that the archive ends at an offset, in bytes.

  Python's tarfile regards a damaged header as the end of the archive.

  Raises:
    tarfile.ReadError: the block at the offset is not empty.
  """
  file.seek(offset)
  if file.read(_BLOCK).strip(b'\0'):
    raise tarfile.ReadError(f'byte {offset:,} is not the start of a header')


def pictures(synset: Synset) -> Iterator[tuple[str, bytes] | Skipped]:
  """Yields names and contents of the images of a synset, in the file's order.

  If the file is damaged, the images before the damage are yielded, and then a
  `Skipped` that describes it. A member that is not a file in the directory of
  the synset is also left out.
  """
  file, count = io.BytesIO(synset.read()), 0
  try:
    with tarfile.open(fileobj=file, mode='r:') as tar:
      for member in tar:
        if member.isdir():
          continue
        count += 1
        name = member.name.removeprefix('./')
        if any(part in ('', '.', '..') for part in name.split('/')):
          reason = 'the path may be outside of the directory'
          yield Skipped(member.name, reason)
        elif not member.isreg():
          yield Skipped(member.name, 'a link or another special member')
        else:
          yield name, _content(tar, member)
      _check_end(file, tar.offset)
  except Exception as error:  # noqa: BLE001 (damaged headers raise many kinds)
    yield Skipped(
      f'{synset.wnid}.tar', f'damaged after {count} members: {error}'
    )


def _read(
  source: pathlib.Path, folder: pathlib.Path, part_bytes: int, workers: int
) -> list[dict[str, Any]]:
  """Reads the archive and writes the parts; returns their notes.

  A part consists of consecutive synsets. Parts that exist are not written
  again. A note about the whole pass is written at its end, so that a compressed
  archive is not read again if a later step is interrupted.
  """
  folder.mkdir(exist_ok=True)
  complete = folder / 'complete.json'
  stats = [(path, path.stat()) for path in _files(source)]
  files = [[str(path), s.st_size, s.st_mtime_ns] for path, s in stats]
  stamp = [files, part_bytes]
  if shards.read_json(complete).get('stamp') != stamp:
    tasks = (
      functools.partial(_read_part, _part_path(folder, number), part)
      for number, part in enumerate(_groups(source, part_bytes))
    )
    written = shards.unordered(tasks, workers)
    expected = num_bytes(source) // part_bytes + 1
    label = f'reading {source.name}'
    count = sum(1 for _ in progress.shown(written, expected, label))
    shards.write_json(complete, {'stamp': stamp, 'count': count})
  count = shards.read_json(complete)['count']
  paths = [_part_path(folder, number) for number in range(count)]
  return [shards.read_json(path.with_suffix('.json')) for path in paths]


def _part_path(folder: pathlib.Path, number: int) -> pathlib.Path:
  """Returns the path of the records of a part.

  The same path with the ending .npy contains the hash of each record, and with
  .json the note of a complete part.
  """
  return folder / f'{number:05d}.array_record'


def _groups(source: pathlib.Path, part_bytes: int) -> Iterator[list[Synset]]:
  """Groups consecutive synsets into parts of about `part_bytes`."""
  group, size = [], 0
  for synset in synsets(source):
    group.append(synset)
    size += synset.size
    if size >= part_bytes:
      yield group
      group, size = [], 0
  if group:
    yield group


def _read_part(path: pathlib.Path, part: list[Synset]) -> None:
  """Checks the images of a part and writes them in the order of their hashes.

  The labels of these records are the numbers in the names of the synsets.
  """
  members = [[s.wnid, s.offset, s.size] for s in part]
  note = path.with_suffix('.json')
  if shards.read_json(note).get('members') == members:
    return
  note.unlink(missing_ok=True)
  records, skipped, total = [], [], 0
  for synset in part:
    for item in pictures(synset):
      where = f'{synset.wnid}/{item[0]}'
      if isinstance(item, Skipped):
        skipped.append([where, item.reason])
        continue
      name, data = item
      record = shards.example(name, int(synset.wnid[1:]), data, where)
      if isinstance(record, Skipped):
        skipped.append(record)
      else:
        records.append((shards.order_key(where), record))
        total += len(data)
  records.sort(key=lambda pair: pair[0])  # stable: equal names stay in order
  shards.write_records(path, (record for _, record in records))
  keys = np.array([key for key, _ in records], np.uint64)
  np.save(path.with_suffix('.npy'), keys)
  about = dict(members=members, num_bytes=total, skipped=skipped)
  shards.write_json(note, about)


def _write(
  work: pathlib.Path,
  parts: list[dict[str, Any]],
  names: list[str],
  shard_bytes: int,
  workers: int,
) -> list[dict[str, Any]]:
  """Writes the shards from the parts; returns their notes."""
  folder = work / 'parts'
  paths = [_part_path(folder, number) for number in range(len(parts))]
  keys = [np.load(path.with_suffix('.npy')) for path in paths]
  ordered = np.sort(np.concatenate(keys))
  if not len(ordered):
    raise UserError('none of the images of the archive can be decoded.')
  total = sum(part['num_bytes'] for part in parts)
  count = min(1 + total // shard_bytes, len(ordered))
  shards.start(work, {'parts': parts, 'names': names, 'count': count})
  cuts = ordered[np.arange(1, count) * len(ordered) // count]
  bounds = np.array(
    [[0, *np.searchsorted(each, cuts), len(each)] for each in keys], np.int32
  )
  labels = {int(name[1:]): label for label, name in enumerate(names)}
  sources = [
    functools.partial(_interval, folder, bounds[:, i : i + 2], labels)
    for i in range(count)
  ]
  return shards.write_shards(work, NAME, sources, workers)


def _interval(
  folder: pathlib.Path,
  bounds: Int[np.ndarray, 'parts 2'],
  labels: dict[int, int],
) -> Iterator[bytes]:
  """Yields the records of one shard, an interval of hashes.

  Args:
    folder: folder of the parts.
    bounds: first record and end (exclusive) of the shard in each part.
    labels: label of each class by the number in its synset.
  """
  found = []
  for number, (start, stop) in enumerate(bounds.tolist()):
    if start < stop:
      path = _part_path(folder, number)
      keys = np.load(path.with_suffix('.npy'), mmap_mode='r')[start:stop]
      reader = ArrayRecordReader(str(path))
      records = reader.read(start, stop)
      reader.close()
      found += zip(keys.tolist(), records, strict=True)
  found.sort(key=lambda pair: pair[0])
  for _, record in found:
    yield shards.with_label(record, labels)


def _class_names(
  parts: Iterable[dict[str, Any]], listed: list[str] | None
) -> list[str]:
  """Returns the synsets in the order of labels.

  Args:
    parts: notes of the parts.
    listed: synsets of the class list, if there is one.

  Raises:
    UserError: the class list lacks a synset of the archive.
  """
  in_archive = sorted({wnid for part in parts for wnid, *_ in part['members']})
  if listed is None:
    return in_archive
  missing = sorted(set(in_archive) - set(listed))
  if missing:
    raise UserError(
      f'--class_list lacks {len(missing):,} of the {len(in_archive):,} synsets '
      f'of the archive: {", ".join(missing[:3])}, … Complete or remove it.'
    )
  return listed


def _class_list(path: pathlib.Path) -> list[str]:
  """Returns the synsets at the starts of the lines of a file.

  Raises:
    UserError: the file cannot be read, has another form, or repeats a synset.
  """
  try:
    lines = path.read_text().splitlines()
  except (OSError, ValueError) as error:
    raise UserError(f'--class_list={path} cannot be read: {error}.') from error
  names = [line.split()[0].rstrip(',') for line in lines if line.strip()]
  wrong = [name for name in names if not re.fullmatch(r'n\d{8}', name)]
  wrong += (collections.Counter(names) - collections.Counter({*names})).keys()
  if wrong or not names:
    raise UserError(
      f'--class_list={path} contains {wrong[:1]}: each line must start with a '
      "different synset, such as 'n00004475'."
    )
  return names
