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
from vit_jax.prepare import array_record, catalog, shards

log = logging.getLogger('vit_jax')
# Names of data sets that the user's own builder has prepared.
_OWN = re.compile(r'\w+(/[\w.-]+)?')
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
  plain, _, version = name.partition(':')
  known = tfds.list_builders(with_community_datasets=False)
  folder, builder = data_dir / plain, None
  own = plain.split('/')[0] not in known and _OWN.fullmatch(plain)
  if not own or not (source or _newest(folder, version)):
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
  target = folder / old.name
  with shards.locked(data_dir, str(inner).replace('/', '-')) as work:
    if old == existing:
      array_record.convert(old, old, workers)
      work.rmdir()
    else:
      info = (old / array_record.INFO).read_text()
      result = shards.prepared_result(work, [str(old.absolute()), info])
      array_record.convert(old, result, workers)
      shards.publish(work, target)
  log.info('%s contains array_record files, converted from %s', target, old)


def _builder(name: str, data_dir: pathlib.Path) -> Any:
  """Returns a builder of TFDS.

  Community builders are not used, because they run code from other sources.

  Raises:
    UserError: TFDS does not have the data set, config or version.
  """
  known = tfds.list_builders(with_community_datasets=False)
  plain = re.split('[/:]', name)[0]
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


def _in_source(
  source: pathlib.Path, inner: pathlib.Path, version: str
) -> pathlib.Path:
  """Returns DIR/NAME/VERSION of --source, which may be DIR or the whole path.

  Raises:
    UserError: the source does not contain the data set.
  """
  info = source / array_record.INFO
  if info.exists() and json.loads(info.read_text())['name'] == inner.parts[0]:
    return source
  version_dir = _newest(source / inner, version)
  if version_dir is None:
    raise UserError(
      f'--source={source} does not contain a prepared {inner}; give the '
      f'directory that contains {inner}/VERSION/{array_record.INFO}.'
    )
  return version_dir


def _newest(folder: pathlib.Path, version: str) -> pathlib.Path | None:
  """Returns the directory of a prepared version; None if there is none.

  Args:
    folder: DIR/NAME of a data set.
    version: version such as '1.0.0'; '' for the newest one.
  """
  for each in map(str, reversed(list_all_versions(folder))):
    if version in ('', each) and (folder / each / array_record.INFO).exists():
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
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  try:
    builder.download_and_prepare(download_config=config)
  except Exception as error:  # TFDS, TensorFlow and the writer raise many kinds
    raise UserError(
      f'{name} cannot be prepared: {type(error).__name__}: {error}. Downloaded '
      'files are kept. Fix the cause (a full disk: free some space, or give '
      'another --data_dir) and run the same command again.'
    ) from error
