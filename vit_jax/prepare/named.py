"""Downloads and prepares data sets of TFDS as array_record.

A data set that exists, as array_record or tfrecord, is left as it is, because
the source `tfds` reads both.
"""

import importlib
import logging
import pathlib
import re
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from vit_jax.data.sources.tfds import versions
from vit_jax.errors import UserError, closest
from vit_jax.prepare import catalog

log = logging.getLogger('vit_jax')
_FORMAT = 'array_record'


def prepare(name: str, data_dir: pathlib.Path) -> None:
  """Downloads a data set of TFDS and prepares it, unless it is prepared.

  Args:
    name: name such as 'cifar10', 'sun397/tfds' or 'imagenet2012:5.1.0', or the
      name of a data set in `data_dir` that the user's own builder has prepared.
    data_dir: TFDS directory.

  Raises:
    UserError: the name is unknown, files have to be downloaded by hand, or TFDS
      cannot prepare the data set.
  """
  plain, _, version = name.partition(':')
  known = tfds.list_builders(with_community_datasets=False)
  folder, builder = data_dir / plain, None
  # Community builders are not used, because they run code from other sources.
  if plain.split('/')[0] in known or not _is_prepared(folder, version):
    builder = _builder(name, data_dir, known)
    folder = pathlib.Path(builder.data_dir).parent
  if builder is None or _is_prepared(folder, version):
    log.info('%s is already prepared: %s', name, folder)
    return
  catalog.require_manual_files(builder, data_dir)
  _download(builder, name)
  log.info('%s is prepared: %s', name, builder.data_dir)


def _is_prepared(folder: pathlib.Path, version: str) -> bool:
  """Returns whether DIR/NAME contains a version; '' for any version."""
  prepared = versions(epath.Path(folder))
  return version in prepared if version else bool(prepared)


def _builder(name: str, data_dir: pathlib.Path, known: list[str]) -> Any:
  """Returns a builder of TFDS.

  Raises:
    UserError: TFDS does not have the data set, config or version.
  """
  plain = re.split('[/:]', name)[0]
  if plain not in known:
    allowed = closest(plain, [*known, 'imagenet21k', 'digits', 'folder'])
    raise UserError(f'{plain!r} is not a known data set; {allowed}.')
  try:
    return tfds.builder(name, data_dir=data_dir, file_format=_FORMAT)
  except (ValueError, AssertionError) as error:
    reason = ' '.join(str(error).rpartition('}": ')[2].split())
    configs = ', '.join(tfds.builder_cls(plain).builder_configs) or 'none'
    raise UserError(
      f'{name!r} is not a data set ({reason}): give NAME, NAME/CONFIG or '
      f'NAME:VERSION; {plain} has the configs {configs}.'
    ) from error


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
      f'{name} cannot be prepared: {type(error).__name__}: {error}. TFDS needs '
      "TensorFlow (pip install 'vit_jax[tensorflow]'), a network and free "
      'space. The same command continues; downloaded files are kept.'
    ) from error
