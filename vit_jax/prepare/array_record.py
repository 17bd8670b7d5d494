"""Converts tfrecord data sets to array_record, which allows random access.

Records are copied unchanged, shard by shard, and their checksums are verified.
(The converter of TFDS needs Apache Beam, does not compare numbers of records,
and leaves out the names of classes.)
"""

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow_datasets as tfds
from etils import epath

from vit_jax.data import progress
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.prepare import parallel, shards

FORMAT = 'array_record'
INFO = 'dataset_info.json'
_OPTIONS = 'group_size:1'  # as in TFDS


def formats(version_dir: pathlib.Path) -> list[str]:
  """Returns the formats of a prepared data set, the main one first."""
  info = json.loads((version_dir / INFO).read_text())
  return [
    info.get('fileFormat', 'tfrecord'),
    *info.get('alternativeFileFormats', []),
  ]


def convert(
  version_dir: pathlib.Path, target: pathlib.Path, workers: int
) -> None:
  """Writes the shards that are missing in the target, and its metadata.

  Args:
    version_dir: DIR/NAME/VERSION of a tfrecord data set, whose files do not
      change.
    target: directory of the result. If it is `version_dir`, array_record
      becomes an alternative format of the data set, whose main format remains
      tfrecord.
    workers: number of processes.

  Raises:
    UserError: a shard cannot be read, or the disk is full.
    OSError: a directory cannot be written.
  """
  missing = [s for s in _shards(version_dir, target) if not s.target.exists()]
  converted = parallel.unordered(_convert, missing, min(workers, len(missing)))
  label = f'converting {version_dir}'
  for _ in progress.shown(converted, len(missing), label):
    pass
  info = json.loads((version_dir / INFO).read_text())
  if target == version_dir:
    info['alternativeFileFormats'] = [*formats(version_dir)[1:], FORMAT]
  else:
    info.pop('alternativeFileFormats', None)
    info['fileFormat'] = FORMAT
    for path in version_dir.iterdir():
      if path.is_file() and '.tfrecord' not in path.name and path.name != INFO:
        shutil.copyfile(path, target / path.name)
  paths.write(epath.Path(target / INFO), json.dumps(info, indent=2))


class _Shard(NamedTuple):
  """A shard of `length` records to convert."""

  source: pathlib.Path
  target: pathlib.Path
  length: int


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


def _convert(shard: _Shard) -> None:
  """Converts one shard."""
  import tensorflow as tf

  def records() -> Iterator[bytes]:
    count = 0
    dataset: Any = tf.data.TFRecordDataset(str(shard.source))
    for record in dataset.as_numpy_iterator():
      count += 1
      yield record
    if count != shard.length:
      raise UserError(
        f'{shard.source} has {count} records, but {INFO} specifies '
        f'{shard.length}. Copy or prepare the data set again.'
      )

  try:
    shards.write_records(shard.target, records(), _OPTIONS)
  except tf.errors.OpError as error:
    raise UserError(
      f'{shard.source} cannot be read ({error.message}): copy or prepare '
      'the data set again.'
    ) from error
