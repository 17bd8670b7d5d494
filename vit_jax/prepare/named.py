"""Downloads, prepares or converts data sets of TFDS."""

import difflib
import importlib.util
import json
import logging
import pathlib
import re
from typing import Any

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils.version import list_all_versions

from vit_jax.errors import UserError
from vit_jax.prepare import array_record, catalog, workspace

log = logging.getLogger('vit_jax')
_INFO = 'dataset_info.json'
_TIMEOUT_S = 10  # for the connection and the first bytes of the response


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
    UserError: the name is unknown, files have to be downloaded by hand, network
      or TensorFlow is missing, or a file is damaged or missing.
    OSError: a file cannot be read or written.
  """
  version = name.partition(':')[2]
  folder = _user_folder(name, data_dir, source)
  builder = None
  if folder is None:
    builder = _builder(name, data_dir)
    folder = pathlib.Path(builder.data_dir).parent
  existing = _newest(folder, version)
  if existing and array_record.FORMAT in array_record.formats(existing):
    log.info('%s is already prepared: %s', name, existing)
    return
  inner = folder.relative_to(data_dir)
  old = existing if source is None else _in_source(source, inner, version)
  if old is None:
    assert builder is not None  # the user's own data sets exist already
    catalog.require_manual_files(builder, data_dir)
    _require_tensorflow(name)
    _require_network(builder, data_dir)
    _download(builder, name)
    log.info('%s is prepared: %s', name, builder.data_dir)
    return
  _require_tensorflow(name)
  first = array_record.formats(old)[0]
  if first != 'tfrecord':
    raise UserError(
      f'{old} has the format {first}; only tfrecord can be converted. Prepare '
      f'{name} in another --data_dir.'
    )
  with workspace.locked(data_dir, str(inner).replace('/', '-')) as work:
    if old == existing:
      array_record.add(old, workers)
      work.rmdir()
    else:
      array_record.copy(old, work, folder / old.name, workers)


def _builder(name: str, data_dir: pathlib.Path) -> Any:
  """Returns a builder of TFDS.

  Community builders are not used, because they run code from other sources.

  Raises:
    UserError: TFDS does not have the data set, config or version.
  """
  known = tfds.list_builders(with_community_datasets=False)
  plain = re.split('[/:]', name)[0]
  if plain.startswith('jft'):
    raise UserError(
      f'{name}: JFT-300M is not public. Use imagenet21k, or build your own '
      'data set: python -m vit_jax.prepare folder --source=DIR --name=my_set'
    )
  if plain not in known:
    names = [*known, 'imagenet21k', 'digits', 'folder']
    near = difflib.get_close_matches(plain, names, n=3, cutoff=0.6)
    hint = f'Did you mean {" or ".join(near)}? ' if near else ''
    raise UserError(
      f'{plain!r} is not a known data set. {hint}Without a name, python -m '
      'vit_jax.prepare lists the known ones.'
    )
  try:
    return tfds.builder(name, data_dir=data_dir, file_format='array_record')
  except (ValueError, AssertionError) as error:
    configs = list(tfds.builder_cls(plain).builder_configs)
    allowed = f'the configs {", ".join(configs)}' if configs else 'no configs'
    text = str(error).rpartition('}": ')[2].split(' Here are')[0].rstrip('.')
    raise UserError(
      f'{name!r} is not a data set: {text}. Allowed are NAME, NAME/CONFIG and '
      f'NAME:VERSION; {plain} has {allowed}.'
    ) from error


def _user_folder(
  name: str, data_dir: pathlib.Path, source: pathlib.Path | None
) -> pathlib.Path | None:
  """Returns DATA_DIR/NAME of a data set prepared by the user's own builder.

  Returns:
    Path; None if the name is one of TFDS, or the data set does not exist.

  Raises:
    UserError: the source contains a data set of another name.
  """
  plain = name.partition(':')[0]
  known = tfds.list_builders(with_community_datasets=False)
  if plain.split('/')[0] in known or not re.fullmatch(r'\w+(/[\w.-]+)?', plain):
    return None
  folder = data_dir / plain
  if source is not None and not _newest(folder, name.partition(':')[2]):
    info = source / _INFO
    actual = json.loads(info.read_text()).get('name') if info.exists() else None
    if actual is not None and actual != plain.split('/')[0]:
      raise UserError(
        f'--source={source} contains the data set {actual!r}, not {plain!r}. '
        f'Use: python -m vit_jax.prepare {actual} --source={source}'
      )
    return folder
  return folder if _newest(folder, name.partition(':')[2]) else None


def _in_source(
  source: pathlib.Path, inner: pathlib.Path, version: str
) -> pathlib.Path:
  """Returns DIR/NAME/VERSION of --source, which may be DIR or the whole path.

  Raises:
    UserError: the source does not contain the data set.
  """
  if (source / _INFO).exists():
    return source
  version_dir = _newest(source / inner, version)
  if version_dir is None:
    raise UserError(
      f'--source={source} does not contain a prepared {inner}; neither this '
      f'directory nor {source / inner}/VERSION contains {_INFO}.'
    )
  return version_dir


def _newest(folder: pathlib.Path, version: str) -> pathlib.Path | None:
  """Returns the directory of a prepared version; None if there is none.

  Args:
    folder: DIR/NAME of a data set.
    version: version such as '1.0.0'; '' for the newest one.
  """
  for each in map(str, reversed(list_all_versions(folder))):
    if version in ('', each) and (folder / each / _INFO).exists():
      return folder / each
  return None


def _require_network(builder: Any, data_dir: pathlib.Path) -> None:
  """Checks that the server of a data set responds, unless files exist already.

  Without a network, TFDS would try each file ten times with growing pauses,
  which takes three and a half minutes.

  Raises:
    UserError: the server of the first file cannot be reached.
  """
  urls = [url for url in builder.url_infos or {} if url.startswith('http')]
  downloads = data_dir / 'downloads'
  if not urls or builder.MANUAL_DOWNLOAD_INSTRUCTIONS or downloads.exists():
    return
  try:
    with requests.get(urls[0], stream=True, timeout=_TIMEOUT_S):
      pass  # TFDS handles error responses
  except requests.RequestException as error:
    raise UserError(
      f'{builder.name} cannot be downloaded from {urls[0]} '
      f'({type(error).__name__}): check the network and, if there is one, the '
      'proxy (HTTPS_PROXY), then run the same command again. Or prepare the '
      f'data set on another machine and copy it to {data_dir}.'
    ) from error


def _require_tensorflow(name: str) -> None:
  if importlib.util.find_spec('tensorflow') is None:
    raise UserError(
      f'preparing {name!r} needs TensorFlow: pip install '
      "'vit_jax[tensorflow]'. "
      '(Reading the prepared data set does not need it.)'
    )


def _download(builder: Any, name: str) -> None:
  """Downloads and prepares a data set.

  Raises:
    UserError: the data set cannot be downloaded or written.
  """
  import tensorflow as tf
  from tensorflow_datasets.core.download import (
    download_manager,
    extractor,
    util,
  )

  config = tfds.download.DownloadConfig(try_download_gcs=False)
  expected = (
    OSError,
    ImportError,
    AssertionError,
    tf.errors.OpError,
    download_manager.NonMatchingChecksumError,
    util.DownloadError,
    extractor.ExtractError,
    extractor.UnsafeArchiveError,
  )
  try:
    builder.download_and_prepare(download_config=config)
  except expected as error:
    raise UserError(
      f'{name} cannot be prepared: {type(error).__name__}: {error}. Downloaded '
      'files are kept. Fix the cause and run the same command again.'
    ) from error
  except RuntimeError as error:  # raised by the array_record writer
    if 'No space left' not in str(error):
      raise
    raise UserError(
      f'{name} cannot be prepared because the disk is full: {error}. Free some '
      'space, or give a --data_dir on a larger disk.'
    ) from error
