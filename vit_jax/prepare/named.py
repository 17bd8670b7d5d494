"""Downloads, prepares or converts data sets of TFDS.

Conversion from tfrecord to array_record copies the records unchanged, shard by
shard, and verifies their checksums. (The converter of TFDS needs Apache Beam,
does not compare numbers of records, and leaves out the names of classes.)
"""

import importlib
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow_datasets as tfds
from etils import epath

from vit_jax.data import progress
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources.tfds import versions
from vit_jax.data.storage import files, index, records
from vit_jax.errors import UserError, closest
from vit_jax.files import paths
from vit_jax.prepare import catalog, parallel, shards

log = logging.getLogger('vit_jax')
FORMAT = 'array_record'
INFO = 'dataset_info.json'
_OPTIONS = 'group_size:1'  # as in TFDS


def prepare(
  name: str,
  data_dir: pathlib.Path,
  *,
  source: pathlib.Path | None = None,
  workers: int = 1,
) -> None:
  """Prepares a TFDS data set as array_record, which allows random access.

  A data set that exists as tfrecord is converted, and its files are kept. With
  `source`, a data set in another directory is converted into `data_dir`. A data
  set that does not exist is downloaded.

  Args:
    name: name such as 'cifar10', 'sun397/tfds' or 'imagenet2012:5.1.0', or the
      name of a data set in `source` or `data_dir` that the user's own builder
      has prepared.
    data_dir: TFDS directory.
    source: another TFDS directory, or DIR/NAME/VERSION in it.
    workers: number of processes for the conversion.

  Raises:
    UserError: the name is unknown, files have to be downloaded by hand, TFDS
      cannot prepare the data set, or a file is damaged or missing.
    OSError: a file cannot be read or written.
  """
  plain, _, version = name.partition(':')
  # Community builders are not used, because they run code from other sources.
  known = tfds.list_builders(with_community_datasets=False)
  folder, builder = data_dir / plain, None
  if plain.split('/')[0] in known or not (source or _newest(folder, version)):
    builder = _builder(name, data_dir, known)
    folder = pathlib.Path(builder.data_dir).parent
  existing = _newest(folder, version)
  if existing and FORMAT in formats(existing):
    log.info('%s is already prepared: %s', name, existing)
    return
  inner = folder.relative_to(data_dir)
  old = _in_source(source, inner, version) if source else existing
  if old is None:
    assert builder is not None  # the user's own data sets exist already
    catalog.require_manual_files(builder, data_dir)
    _download(builder, name)
    log.info('%s is prepared: %s', name, builder.data_dir)
    return
  target = folder / old.name
  with shards.locked(data_dir, str(inner).replace('/', '-')) as work:
    if old == existing:
      convert(old, old, workers)
      work.rmdir()
    else:
      plan = [str(old.absolute()), (old / INFO).read_text()]
      convert(old, shards.prepared_result(work, plan), workers)
      shards.publish(work, target)
  log.info('%s contains array_record files, converted from %s', target, old)


def _builder(name: str, data_dir: pathlib.Path, known: list[str]) -> Any:
  """Returns a builder of TFDS.

  Raises:
    UserError: TFDS does not have the data set, config or version.
  """
  plain = re.split('[/:]', name)[0]
  if plain not in known:
    allowed = closest(plain, [*known, 'imagenet21k', 'digits', 'folder'])
    raise UserError(
      f'{plain!r} is not a known data set; {allowed}. Without a name, python '
      '-m vit_jax.prepare lists those of the paper.'
    )
  try:
    return tfds.builder(name, data_dir=data_dir, file_format=FORMAT)
  except (ValueError, AssertionError) as error:
    reason = ' '.join(str(error).rpartition('}": ')[2].split())
    configs = ', '.join(tfds.builder_cls(plain).builder_configs) or 'none'
    raise UserError(
      f'{name!r} is not a data set ({reason}): give NAME, NAME/CONFIG or '
      f'NAME:VERSION; {plain} has the configs {configs}.'
    ) from error


def _in_source(
  source: pathlib.Path, inner: pathlib.Path, version: str
) -> pathlib.Path:
  """Returns DIR/NAME/VERSION of --source, which may be DIR or the whole path.

  Raises:
    UserError: the source does not contain the data set.
  """
  info = source / INFO
  if info.exists() and json.loads(info.read_text())['name'] == inner.parts[0]:
    return source
  version_dir = _newest(source / inner, version)
  if version_dir is None:
    raise UserError(
      f'--source={source} does not contain a prepared {inner}; give the '
      f'directory that contains {inner}/VERSION/{INFO}.'
    )
  return version_dir


def _newest(folder: pathlib.Path, version: str) -> pathlib.Path | None:
  """Returns the directory of a prepared version; None if there is none.

  Args:
    folder: DIR/NAME of a data set.
    version: version such as '1.0.0'; '' for the newest one.
  """
  there = versions(epath.Path(folder))
  chosen = version or (there[-1] if there else '')
  return folder / chosen if chosen in there else None


def _download(builder: Any, name: str) -> None:
  """Downloads and prepares a data set.

  Raises:
    UserError: the data set cannot be downloaded or written.
  """
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  try:
    # TFDS would import it after trying to reach the network for minutes.
    importlib.import_module('tensorflow')
    builder.download_and_prepare(download_config=config)
  except Exception as error:  # TFDS, TensorFlow and the writer raise many kinds
    raise UserError(
      f'{name} cannot be prepared: {type(error).__name__}: {error}. Downloaded '
      "files are kept. TFDS needs TensorFlow (pip install 'vit_jax[tensorflow]'"
      ') and a network. Fix the cause (a full disk: free some space, or give '
      'another --data_dir) and run the same command again.'
    ) from error


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
    UserError: the format is not tfrecord, a shard cannot be read, or the disk
      is full.
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
  """Converts one shard.

  Raises:
    UserError: the shard is not a complete tfrecord file.
  """
  path = os.fspath(shard.source)
  try:
    columns, cut = records.scan(path)
    count = len(columns['offset'])
    if count != shard.length or cut != index.WHOLE:
      raise DecodeError(f'{count} whole records, not {shard.length}')
    opened = files.Files([path])
    rows = zip(
      columns['offset'].tolist(), columns['size'].tolist(), strict=True
    )
    content = (records.read(opened, 0, *row) for row in rows)
    shards.write_records(shard.target, content, _OPTIONS)
  except (OSError, DecodeError) as error:
    raise UserError(
      f'{path} cannot be read ({error}): copy or prepare the data set again, '
      'as tfrecord.'
    ) from error
