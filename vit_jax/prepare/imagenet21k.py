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
repeated. The first pass reads every synset, checks every image and writes
sorted runs. The second pass writes every shard from its pieces of the runs. In
addition to the archive, this needs disk space of twice its size, half of it
only temporarily.
"""

import collections
import dataclasses
import logging
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.prepare import archive, images, parallel, runs, shards, workspace
from vit_jax.prepare.archive import Skipped, Synset

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
    part_bytes: bytes of the archive per run.
    shard_bytes: approximate size of one shard of the result.

  Raises:
    UserError: the source or the class list cannot be used, or the disk is too
      small.
    OSError: a file cannot be read or written.
  """
  listed = _class_list(class_list) if class_list else None
  next(archive.synsets(source))  # raises if the source cannot be used
  with workspace.locked(data_dir, NAME) as work:
    workspace.require_space(work, 2 * archive.num_bytes(source))
    parts = _read(source, work, part_bytes, workers)
    names = _class_names(parts, listed)
    split, result = _write(work, parts, names, shard_bytes, workers)
    skipped = [Skipped(*item) for part in parts for item in part['skipped']]
    shards.write_list(result / 'undecodable.txt', skipped)
    shards.write_metadata(result, NAME, {'train': split}, names, _DESCRIPTION)
    target = data_dir / NAME / workspace.VERSION
    workspace.publish(work, result, target)
  num_images = sum(split.lengths)
  log.info(
    '%s: %s images in %s classes; %s left out, listed in undecodable.txt',
    target,
    f'{num_images:,}',
    f'{len(names):,}',
    f'{len(skipped):,}',
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
  """Synsets that are written as one run.

  Attributes:
    folder: folder of the runs.
    number: number of the run.
    synsets: consecutive synsets of the archive.
  """

  folder: pathlib.Path
  number: int
  synsets: tuple[Synset, ...]

  @property
  def members(self) -> list[list[Any]]:
    """[WordNet name, offset, size] of each synset.

    They are stored in the description of the sorted file, to check whether that
    file is up to date.
    """
    return [[s.wnid, s.offset, s.size] for s in self.synsets]


def _read(
  source: pathlib.Path, work: pathlib.Path, part_bytes: int, workers: int
) -> list[dict[str, Any]]:
  """Reads the archive and writes the runs; returns a description of each run.

  Runs that exist are not written again. A note about the whole pass is written
  at its end, so that a compressed archive is not read again if a later step is
  interrupted.
  """
  folder, note = work / 'runs', work / 'read.json'
  folder.mkdir(exist_ok=True)
  stamp = [archive.stamp(source), part_bytes]
  if (runs.read_json(note) or {}).get('stamp') != stamp:
    count = _read_parts(source, folder, part_bytes, workers)
    runs.write_json(note, {'stamp': stamp, 'count': count})
  count = runs.read_json(note)['count']
  return [runs.about(folder, number) or {} for number in range(count)]


def _read_parts(
  source: pathlib.Path, folder: pathlib.Path, part_bytes: int, workers: int
) -> int:
  """Writes the missing runs; returns the number of all runs."""
  progress = parallel.Progress(f'reading {source.name}')
  count = 0

  def missing() -> Iterator[_Part]:
    nonlocal count
    for count, group in enumerate(_groups(source, part_bytes), 1):
      part = _Part(folder, count - 1, group)
      about = runs.about(folder, part.number)
      if about is not None and about['members'] == part.members:
        progress.skip(group[-1].share)
        continue
      runs.forget(folder, part.number)
      yield part

  for fraction, images_read in parallel.unordered(
    _read_part, missing(), workers
  ):
    progress.add(fraction, images_read)
  return count


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


def _read_part(part: _Part) -> tuple[float, int]:
  """Checks the images of a part and writes them, sorted, to one file.

  Returns:
    Fraction of the source up to the end of the part, and number of images in
    the part.
  """
  records, skipped = [], []
  for synset in part.synsets:
    for item in archive.pictures(synset):
      name = f'{synset.wnid}/{item.name}'
      reason = (
        item.reason if isinstance(item, Skipped) else images.problem(item.data)
      )
      if isinstance(item, Skipped) or reason is not None:
        skipped.append(Skipped(name, reason or ''))
        continue
      code = int(synset.wnid[1:])
      stored = item.name.encode('utf-8', 'surrogateescape')
      records.append(runs.Record(runs.key(name), code, stored, item.data))
  about = {
    'members': part.members,
    'images': len(records),
    'num_bytes': sum(len(record.image) for record in records),
    'skipped': skipped,
  }
  runs.write(part.folder, part.number, records, about)
  return part.synsets[-1].share, len(records)


def _write(
  work: pathlib.Path,
  parts: list[dict[str, Any]],
  names: list[str],
  shard_bytes: int,
  workers: int,
) -> tuple[shards.Split, pathlib.Path]:
  """Writes the shards from the runs; returns the split and its directory."""
  total = sum(part['images'] for part in parts)
  if not total:
    raise UserError('none of the images of the archive can be decoded.')
  num_bytes = sum(part['num_bytes'] for part in parts)
  count = min(1 + num_bytes // shard_bytes, total)
  plan = {'parts': parts, 'names': names, 'shards': count}
  result = shards.prepared_result(work, plan)
  bounds = runs.cut(work / 'runs', len(parts), count)
  labels = {int(name[1:]): label for label, name in enumerate(names)}
  sources = [
    _Pieces(work / 'runs', bounds[:, i : i + 2], labels) for i in range(count)
  ]
  return shards.write_split(work, NAME, 'train', sources, workers), result


@dataclasses.dataclass(frozen=True)
class _Pieces:
  """A picklable function that yields the examples of one shard.

  Attributes:
    folder: folder of the runs.
    pieces: `[runs, 2]`, first entry and end (exclusive) of the shard in each
      run.
    labels: label of each class by the number in its synset.
  """

  folder: pathlib.Path
  pieces: np.ndarray
  labels: dict[int, int]

  def __call__(self) -> Iterator[shards.Example]:
    for code, name, image in runs.read(self.folder, self.pieces):
      yield shards.Example(name, self.labels[code], image)


def _class_names(
  parts: Iterable[dict[str, Any]], listed: list[str] | None
) -> list[str]:
  """Returns the synsets in the order of labels.

  Args:
    parts: descriptions of the runs.
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
      f'of the archive: {", ".join(missing[:3])}, … Give a complete list, or '
      'remove --class_list to number the synsets by their names.'
    )
  return listed


def _class_list(path: pathlib.Path) -> list[str]:
  """Returns the synsets at the starts of the lines of a file.

  Raises:
    UserError: the file cannot be read, has another form, or repeats a synset.
  """
  try:
    lines = path.read_text().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--class_list={path} cannot be read: {error}.') from error
  names = [line.split()[0].rstrip(',') for line in lines if line.strip()]
  for name, count in collections.Counter(names).items():
    if count > 1 or not re.fullmatch(r'n\d{8}', name):
      raise UserError(
        f'--class_list={path} has {name!r} {count} time(s); each line must '
        "start with a different synset, such as 'n00004475'."
      )
  if not names:
    raise UserError(f'--class_list={path} is empty; give one synset per line.')
  return names
