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
"""

import collections
import dataclasses
import logging
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from array_record.python.array_record_module import (  # pyright: ignore
  ArrayRecordReader,
)
from jaxtyping import Int

from vit_jax.data import progress
from vit_jax.errors import UserError
from vit_jax.prepare import archive, parallel, shards
from vit_jax.prepare.archive import Synset
from vit_jax.prepare.shards import Skipped

log = logging.getLogger('vit_jax')
NAME = 'imagenet21k'
PART_BYTES = 2**29  # bytes of the archive that a worker reads into memory
_VALIDATION = 51_200  # images held out by configs/l16_i21k.py
_DESCRIPTION = (
  'ImageNet-21k: every image of the public archive that can be decoded, by '
  'synset, in random order.'
)


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
    source: path of the archive; see `archive`.
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
  next(archive.synsets(source))  # raises if the source cannot be used
  with shards.locked(data_dir, NAME) as work:
    shards.require_space(work, 2 * archive.num_bytes(source))
    parts = _read(source, work / 'parts', part_bytes, workers)
    names = _class_names(parts, listed)
    split = _write(work, parts, names, shard_bytes, workers)
    split.skipped.extend(
      Skipped(*item) for part in parts for item in part['skipped']
    )
    target = shards.finish(work, NAME, {'train': split}, names, _DESCRIPTION)
  num_images = sum(split.lengths)
  log.info(
    '%s: %s images in %s classes; %s left out, listed in undecodable.txt',
    target,
    f'{num_images:,}',
    f'{len(names):,}',
    f'{len(split.skipped):,}',
  )
  if num_images > _VALIDATION:
    log.info(
      'to train on it: python -m vit_jax.train --config=configs/l16_i21k.py '
      '--config.source.data_dir=%s --config.train.num_examples=%d',
      data_dir,
      num_images - _VALIDATION,
    )


@dataclasses.dataclass(frozen=True)
class _Part:
  """Consecutive synsets of the archive, whose records are one file.

  Attributes:
    path: path of the array_record file. The same path with the ending .npy
      contains the hash of each record; with .json, the description of a
      complete part.
    synsets: synsets of the part.
  """

  path: pathlib.Path
  synsets: tuple[Synset, ...]


def _read(
  source: pathlib.Path, folder: pathlib.Path, part_bytes: int, workers: int
) -> list[dict[str, Any]]:
  """Reads the archive and writes the parts; returns their descriptions.

  Parts that exist are not written again. A note about the whole pass is written
  at its end, so that a compressed archive is not read again if a later step is
  interrupted.
  """
  folder.mkdir(exist_ok=True)
  note = folder / 'complete.json'
  stamp = [archive.file_stats(source), part_bytes]
  if (shards.read_json(note) or {}).get('stamp') != stamp:
    parts = (
      _Part(_part_path(folder, number), synsets)
      for number, synsets in enumerate(_groups(source, part_bytes))
    )
    written = parallel.unordered(_read_part, parts, workers)
    expected = archive.num_bytes(source) // part_bytes + 1
    label = f'reading {source.name}'
    count = sum(1 for _ in progress.shown(written, expected, label))
    shards.write_json(note, {'stamp': stamp, 'count': count})
  count = shards.read_json(note)['count']
  paths = [_part_path(folder, number) for number in range(count)]
  return [shards.read_json(path.with_suffix('.json')) for path in paths]


def _part_path(folder: pathlib.Path, number: int) -> pathlib.Path:
  return folder / f'{number:05d}.array_record'


def _groups(
  source: pathlib.Path, part_bytes: int
) -> Iterator[tuple[Synset, ...]]:
  """Groups consecutive synsets into parts of about `part_bytes`."""
  group, size = [], 0
  for synset in archive.synsets(source):
    group.append(synset)
    size += synset.size
    if size >= part_bytes:
      yield tuple(group)
      group, size = [], 0
  if group:
    yield tuple(group)


def _read_part(part: _Part) -> None:
  """Checks the images of a part and writes them in the order of their hashes.

  The labels of these records are the numbers in the names of the synsets.
  """
  members = [[s.wnid, s.offset, s.size] for s in part.synsets]
  note = part.path.with_suffix('.json')
  if (shards.read_json(note) or {}).get('members') == members:
    return
  note.unlink(missing_ok=True)
  records, skipped, num_bytes = [], [], 0
  for synset in part.synsets:
    for item in archive.pictures(synset):
      name = f'{synset.wnid}/{item.name}'
      if isinstance(item, Skipped):
        skipped.append([name, item.reason])
      elif reason := shards.problem(item.data):
        skipped.append([name, reason])
      else:
        record = shards.example(item.name, int(synset.wnid[1:]), item.data)
        records.append((shards.key(name), record))
        num_bytes += len(item.data)
  records.sort(key=lambda pair: pair[0])  # stable: equal names stay in order
  data = (record for _, record in records)
  shards.write_records(part.path, data)
  keys = np.array([key for key, _ in records], np.uint64)
  np.save(part.path.with_suffix('.npy'), keys)
  about = dict(members=members, num_bytes=num_bytes, skipped=skipped)
  shards.write_json(note, about)


def _write(
  work: pathlib.Path,
  parts: list[dict[str, Any]],
  names: list[str],
  shard_bytes: int,
  workers: int,
) -> shards.Split:
  """Writes the shards from the parts."""
  paths = [_part_path(work / 'parts', number) for number in range(len(parts))]
  keys = [np.load(path.with_suffix('.npy')) for path in paths]
  ordered = np.sort(np.concatenate(keys))
  if not len(ordered):
    raise UserError('none of the images of the archive can be decoded.')
  num_bytes = sum(part['num_bytes'] for part in parts)
  count = min(1 + num_bytes // shard_bytes, len(ordered))
  shards.start(work, {'parts': parts, 'names': names, 'count': count})
  cuts = ordered[np.arange(1, count) * len(ordered) // count]
  bounds = np.array(
    [[0, *np.searchsorted(each, cuts), len(each)] for each in keys], np.int32
  )
  labels = {int(name[1:]): label for label, name in enumerate(names)}
  sources = [
    _Interval(work / 'parts', bounds[:, i : i + 2], labels)
    for i in range(count)
  ]
  return shards.write_split(work, NAME, 'train', sources, workers)


@dataclasses.dataclass(frozen=True)
class _Interval:
  """A picklable function that yields the records of one shard.

  Attributes:
    folder: folder of the parts.
    bounds: `[parts, 2]`, first record and end (exclusive) of the shard in each
      part.
    labels: label of each class by the number in its synset.
  """

  folder: pathlib.Path
  bounds: Int[np.ndarray, 'parts 2']
  labels: dict[int, int]

  def __call__(self) -> Iterator[bytes]:
    found = []
    for number, (start, stop) in enumerate(self.bounds.tolist()):
      if start < stop:
        path = _part_path(self.folder, number)
        keys = np.load(path.with_suffix('.npy'), mmap_mode='r')[start:stop]
        reader = ArrayRecordReader(str(path))
        records = reader.read(start, stop)
        reader.close()
        found += zip(keys.tolist(), records, strict=True)
    found.sort(key=lambda pair: pair[0])
    for _, record in found:
      yield shards.with_label(record, self.labels)


def _class_names(
  parts: Iterable[dict[str, Any]], listed: list[str] | None
) -> list[str]:
  """Returns the synsets in the order of labels.

  Args:
    parts: descriptions of the parts.
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
    names = [line.split()[0].rstrip(',') for line in lines if line.strip()]
    for name, count in collections.Counter(names or ['']).items():
      if count > 1 or not re.fullmatch(r'n\d{8}', name):
        raise ValueError(f'it has {name!r} {count} time(s)')
  except (OSError, ValueError) as error:
    raise UserError(
      f'--class_list={path} cannot be used: {error}. Each line must start with '
      "a different synset, such as 'n00004475'."
    ) from error
  return names
