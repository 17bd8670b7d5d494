"""Converts tfrecord data sets to array_record, which allows random access.

Records are copied unchanged, shard by shard, and their checksums are verified.
`add` makes array_record an alternative format of the data set, whose main
format remains tfrecord; `copy` writes a new data set.
"""

import dataclasses
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from vit_jax.errors import UserError
from vit_jax.files import atomic
from vit_jax.prepare import parallel, shards, workspace

log = logging.getLogger('vit_jax')
FORMAT = 'array_record'
_OPTIONS = 'group_size:1'  # as in TFDS
_INFO = 'dataset_info.json'


def formats(version_dir: pathlib.Path) -> list[str]:
  """Returns the formats of a prepared data set, the main one first."""
  info = json.loads((version_dir / _INFO).read_text())
  return [
    info.get('fileFormat', 'tfrecord'),
    *info.get('alternativeFileFormats', []),
  ]


def add(version_dir: pathlib.Path, workers: int) -> None:
  """Adds array_record files to a tfrecord data set.

  Args:
    version_dir: DIR/NAME/VERSION of the prepared data set.
    workers: number of processes.

  Raises:
    UserError: a shard cannot be read, or the disk is full.
    OSError: the directory cannot be written.
  """
  _convert(version_dir, version_dir, workers)
  path = version_dir / _INFO
  info = json.loads(path.read_text())
  info['alternativeFileFormats'] = [*formats(version_dir)[1:], FORMAT]
  atomic.write(epath.Path(path), json.dumps(info, indent=2))
  log.info(
    '%s now contains array_record files next to its tfrecord files', version_dir
  )


def copy(
  version_dir: pathlib.Path,
  work: pathlib.Path,
  target: pathlib.Path,
  workers: int,
) -> None:
  """Writes an array_record copy of a tfrecord data set.

  Args:
    version_dir: DIR/NAME/VERSION of the prepared data set, which is not
      changed.
    work: working directory.
    target: DIR/NAME/VERSION of the result.
    workers: number of processes.

  Raises:
    UserError: a shard cannot be read, the disk is full, or the target
      exists.
    OSError: a directory cannot be written.
  """
  plan = [str(version_dir.absolute()), (version_dir / _INFO).read_text()]
  result = shards.prepared_result(work, plan)
  _convert(version_dir, result, workers)
  for path in version_dir.iterdir():
    if path.is_file() and '.tfrecord' not in path.name and path.name != _INFO:
      shutil.copyfile(path, result / path.name)
  info = json.loads((version_dir / _INFO).read_text())
  info.pop('alternativeFileFormats', None)
  info['fileFormat'] = FORMAT
  (result / _INFO).write_text(json.dumps(info, indent=2))
  workspace.publish(work, result, target)
  log.info('%s: converted from %s', target, version_dir)


@dataclasses.dataclass(frozen=True)
class _Shard:
  """A shard of `length` records to convert."""

  source: pathlib.Path
  target: pathlib.Path
  length: int


def _convert(
  version_dir: pathlib.Path, target: pathlib.Path, workers: int
) -> None:
  """Converts the shards that are missing in the target."""
  tasks = [s for s in _shards(version_dir, target) if not s.target.exists()]
  total = max(sum(task.length for task in tasks), 1)
  progress = parallel.Progress(f'converting {version_dir}')
  done = 0
  workers = min(workers, max(len(tasks), 1))
  for length in parallel.unordered(_convert_shard, tasks, workers):
    done += length
    progress.add(done / total, length)


def _shards(
  version_dir: pathlib.Path, target: pathlib.Path
) -> Iterator[_Shard]:
  """Yields all shards of a data set, with their paths in the target."""
  builder = tfds.builder_from_directory(version_dir)
  for split in builder.info.splits.values():
    source_names = split.filename_template
    assert source_names is not None  # set by TFDS for splits that it has read
    names = source_names.replace(data_dir=target, filetype_suffix=FORMAT)
    count = len(split.shard_lengths)
    for i, length in enumerate(split.shard_lengths):
      shard = dict(shard_index=i, num_shards=count)
      yield _Shard(
        pathlib.Path(source_names.sharded_filepath(**shard)),
        pathlib.Path(names.sharded_filepath(**shard)),
        length,
      )


def _convert_shard(shard: _Shard) -> int:
  """Converts one shard; returns its number of records."""
  import tensorflow as tf

  count = 0

  def records() -> Iterator[bytes]:
    nonlocal count
    dataset: Any = tf.data.TFRecordDataset(str(shard.source))
    for record in dataset.as_numpy_iterator():
      count += 1
      yield record
    if count != shard.length:
      raise UserError(
        f'{shard.source} has {count} records, but dataset_info.json specifies '
        f'{shard.length}. Copy or prepare the data set again.'
      )

  try:
    shards.write_records(shard.target, records(), _OPTIONS)
  except tf.errors.OpError as error:
    raise UserError(
      f'{shard.source} cannot be read ({error.message}): copy or prepare '
      'the data set again.'
    ) from error
  return count
