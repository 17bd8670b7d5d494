"""Data sets that TFDS knows by name: downloaded, prepared, or converted."""

import difflib
import importlib.util
import json
import logging
import pathlib
import re
from typing import Any

import tensorflow_datasets as tfds

from vit_jax.errors import UserError
from vit_jax.prepare import array_record, catalog, network, workspace

log = logging.getLogger('vit_jax')
_VERSION = re.compile(r'\d+\.\d+\.\d+')


def prepare(
  name: str,
  data_dir: pathlib.Path,
  *,
  source: pathlib.Path | None = None,
  workers: int = 1,
) -> None:
  """Makes a TFDS data set readable at random, as array_record.

  What is prepared as tfrecord is converted, beside the old files; with
  `source`, a data set prepared elsewhere is converted into `data_dir`. What is
  not prepared is downloaded.

  Args:
    name: 'cifar10', 'sun397/tfds', 'imagenet2012:5.1.0'; or of a data set that
      a builder of one's own has prepared, in `source` or in `data_dir`.
    data_dir: the TFDS directory.
    source: another TFDS directory, or DIR/NAME/VERSION in it.
    workers: processes that convert.

  Raises:
    UserError: an unknown name, files that a person has to fetch, no network, no
      TensorFlow, a damaged or missing file.
    OSError: a file cannot be read or written.
  """
  version = name.partition(':')[2]
  folder = _of_own(name, data_dir, source)
  builder = None
  if folder is None:
    builder = _builder(name, data_dir)
    folder = pathlib.Path(builder.data_dir).parent
  there = _newest(folder, version)
  if there and array_record.FORMAT in array_record.formats(there):
    log.info('%s is prepared already: %s', name, there)
    return
  inner = folder.relative_to(data_dir)
  old = there if source is None else _elsewhere(source, inner, version)
  if old is None:
    assert builder is not None  # of what is one's own, something is there
    catalog.require_manual_files(builder, data_dir)
    _require_tensorflow(name)
    network.require(builder, data_dir)
    _download(builder, name)
    log.info('%s is prepared: %s', name, builder.data_dir)
    return
  _require_tensorflow(name)
  first = array_record.formats(old)[0]
  if first != 'tfrecord':
    raise UserError(
      f'{old} is prepared as {first}, and only tfrecord can be converted: '
      f'prepare {name} in another --data_dir.'
    )
  with workspace.locked(data_dir, str(inner).replace('/', '-')) as work:
    if old == there:
      array_record.add(old, workers)
      work.rmdir()
    else:
      array_record.copy(old, work, folder / old.name, workers)


def _builder(name: str, data_dir: pathlib.Path) -> Any:
  """TFDS's own builders only: community ones are code from elsewhere."""
  known = tfds.list_builders(with_community_datasets=False)
  plain = re.split('[/:]', name)[0]
  if plain.startswith('jft'):
    raise UserError(
      f'{name}: JFT-300M is not public. Take imagenet21k, or make your own '
      'data set: python -m vit_jax.prepare folder --source=DIR --name=my_set'
    )
  if plain not in known:
    own = [*known, 'imagenet21k', 'digits', 'folder']
    near = difflib.get_close_matches(plain, own, n=3, cutoff=0.6)
    hint = f'Did you mean {" or ".join(near)}? ' if near else ''
    raise UserError(
      f'{plain!r} is no data set that is known. {hint}Without a name, python '
      '-m vit_jax.prepare lists what is.'
    )
  try:
    return tfds.builder(name, data_dir=data_dir, file_format='array_record')
  except (ValueError, AssertionError) as error:
    configs = list(tfds.builder_cls(plain).builder_configs)
    there = f'the configs {", ".join(configs)}' if configs else 'no configs'
    text = str(error).rpartition('}": ')[2].split(' Here are')[0].rstrip('.')
    raise UserError(
      f'{name!r} names no data set: {text}. Allowed are NAME, NAME/CONFIG and '
      f'NAME:VERSION; {plain} has {there}.'
    ) from error


def _of_own(
  name: str, data_dir: pathlib.Path, source: pathlib.Path | None
) -> pathlib.Path | None:
  """DATA_DIR/NAME of what a builder of one's own has prepared.

  None if TFDS knows the name, or nothing of that name is prepared.
  """
  plain = name.partition(':')[0]
  known = tfds.list_builders(with_community_datasets=False)
  if plain.split('/')[0] in known or not re.fullmatch(r'\w+(/[\w.-]+)?', plain):
    return None
  folder = data_dir / plain
  if source is not None and not _newest(folder, name.partition(':')[2]):
    info = source / 'dataset_info.json'
    own = json.loads(info.read_text()).get('name') if info.exists() else None
    if own is not None and own != plain.split('/')[0]:
      raise UserError(
        f'--source={source} holds the data set {own!r}, not {plain!r}: '
        f'python -m vit_jax.prepare {own} --source={source}'
      )
    return folder
  return folder if _newest(folder, name.partition(':')[2]) else None


def _elsewhere(
  source: pathlib.Path, inner: pathlib.Path, version: str
) -> pathlib.Path:
  """DIR/NAME/VERSION of what --source names: itself, or inside."""
  if (source / 'dataset_info.json').exists():
    return source
  found = _newest(source / inner, version)
  if found is None:
    raise UserError(
      f'--source={source} holds no prepared {inner}: neither it nor '
      f'{source / inner}/VERSION has a dataset_info.json.'
    )
  return found


def _newest(folder: pathlib.Path, version: str) -> pathlib.Path | None:
  """Returns the newest (or the given) version that is prepared in a folder."""
  found = [
    path
    for path in (folder.iterdir() if folder.is_dir() else [])
    if _VERSION.fullmatch(path.name) and (path / 'dataset_info.json').exists()
    if version in ('', path.name)
  ]
  return max(
    found, key=lambda p: tuple(map(int, p.name.split('.'))), default=None
  )


def _require_tensorflow(name: str) -> None:
  if importlib.util.find_spec('tensorflow') is None:
    raise UserError(
      f'preparing {name!r} needs TensorFlow once: pip install tensorflow-cpu '
      '(reading it does not).'
    )


def _download(builder: Any, name: str) -> None:
  """Downloads and prepares; what is not a bug becomes a UserError."""
  import tensorflow as tf
  from tensorflow_datasets.core.download import (
    download_manager,
    extractor,
    util,
  )

  config = tfds.download.DownloadConfig(try_download_gcs=False)
  expected = (
    *(OSError, ImportError, AssertionError, tf.errors.OpError),
    *(download_manager.NonMatchingChecksumError, util.DownloadError),
    *(extractor.ExtractError, extractor.UnsafeArchiveError),
  )
  try:
    builder.download_and_prepare(download_config=config)
  except expected as error:
    raise UserError(
      f'{name} cannot be prepared: {type(error).__name__}: {error}. Files that '
      'were downloaded stay; once the cause is mended, the same command goes '
      'on.'
    ) from error
  except RuntimeError as error:  # of the array_record writer
    if 'No space left' not in str(error):
      raise
    raise UserError(
      f'{name} cannot be prepared, the disk is full: {error}. Make room, or '
      'give a --data_dir on a larger disk.'
    ) from error
