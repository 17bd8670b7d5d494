"""Prepares data sets of TFDS as array_record.

A data set that exists, as array_record or tfrecord, is left as it is, because
the source `tfds` reads both. Because of their licences, some files must be
downloaded by hand and put into DATA_DIR/downloads/manual: archives of ImageNet
unchanged, those of other data sets unpacked.
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

log = logging.getLogger('vit_jax')
# Files that must be downloaded by hand. If an archive of ImageNet is missing,
# TFDS would leave out its split without an error.
_MANUAL = {
  'imagenet2012': ('ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar'),
  'imagenet2012_real': ('ILSVRC2012_img_val.tar',),
  'resisc45': ('NWPU-RESISC45',),
  'diabetic_retinopathy_detection': ('trainLabels.csv', 'train', 'test'),
}


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
  with_config, _, version = name.partition(':')
  # Community builders are not used, because they run code from other sources.
  known = tfds.list_builders(with_community_datasets=False)
  is_known = with_config.split('/')[0] in known
  # The user's own builder may have prepared a data set that TFDS does not have.
  if not is_known and _is_prepared(data_dir / with_config, version):
    log.info('%s is already prepared: %s', name, data_dir / with_config)
    return
  builder = _builder(name, data_dir, known)
  folder = pathlib.Path(builder.data_dir).parent
  if _is_prepared(folder, version):
    log.info('%s is already prepared: %s', name, folder)
    return
  _require_manual_files(builder, data_dir)
  _download(builder, name)
  log.info('%s is prepared: %s', name, builder.data_dir)


def _is_prepared(folder: pathlib.Path, version: str) -> bool:
  """Returns whether a folder DIR/NAME contains a version; '' for any one."""
  prepared = versions(epath.Path(folder))
  return version in prepared if version else bool(prepared)


def _builder(name: str, data_dir: pathlib.Path, known: list[str]) -> Any:
  """Returns a builder of TFDS.

  Raises:
    UserError: TFDS does not have the data set, config or version.
  """
  plain = re.split('[/:]', name)[0]
  if plain not in known:
    allowed = closest(plain, [*known, 'imagenet21k', 'digits'])
    raise UserError(
      f'{plain!r} is not a known data set; {allowed}. A folder of images needs '
      'no preparation: train with --config=configs/folder.py:path=DIR.'
    )
  try:
    return tfds.builder(name, data_dir=data_dir, file_format='array_record')
  except (ValueError, AssertionError) as error:
    # TFDS puts the arguments of the builder in front of the reason.
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


def _require_manual_files(builder: Any, data_dir: pathlib.Path) -> None:
  """Checks that the files of manual downloads exist.

  Args:
    builder: builder of TFDS.
    data_dir: TFDS directory.

  Raises:
    UserError: files are missing; the message lists them, with the instructions
      of TFDS.
  """
  if not builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
    return
  folder = data_dir / 'downloads/manual'
  files = _MANUAL.get(builder.name, ())
  missing = [name for name in files if not (folder / name).exists()]
  if not files and not (folder.is_dir() and any(folder.iterdir())):
    missing = ['the files that TFDS requires']
  if missing:
    instructions = ' '.join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())
    raise UserError(
      f'{builder.name} has to be downloaded by hand; missing in {folder}: '
      f'{" and ".join(missing)}. {instructions}'
    )
