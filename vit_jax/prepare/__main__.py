"""Prepares data sets: python -m vit_jax.prepare NAME [--source=PATH].

NAME is imagenet21k (--source: its archive), folder (--source: a folder of
images by class, --name: of the data set), digits, or any data set of TFDS,
which is downloaded or, if it is there as tfrecord, converted to array_record;
so is what your own TFDS builder has prepared (--source: its TFDS directory).
Without NAME: lists what is known.
"""

import errno
import logging
import pathlib

from absl import flags

from vit_jax.cli import process
from vit_jax.data.sources import digits
from vit_jax.data.sources.tfds import default_data_dir
from vit_jax.data.storage import files
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.prepare import (
  catalog,
  folder,
  imagenet21k,
  named,
  parallel,
  workspace,
)
from vit_jax.processes import interruption

log = logging.getLogger('vit_jax')
_OWN = (digits.NAME, imagenet21k.NAME, folder.NAME)


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string(
    'source', None, 'An archive, a folder of images, or a TFDS directory.'
  )
  flags.DEFINE_string(
    'data_dir', None, 'The TFDS directory; default $TFDS_DATA_DIR.'
  )
  flags.DEFINE_string('name', None, 'Name of the data set made of a folder.')
  flags.DEFINE_string(
    'class_list', None, 'File of synsets in the order of labels (imagenet21k).'
  )
  flags.DEFINE_integer('workers', 0, 'Processes; 0 for one a core.')


def run(
  name: str,
  *,
  data_dir: str | None = None,
  source: str | None = None,
  set_name: str | None = None,
  class_list: str | None = None,
  workers: int = 0,
) -> None:
  """Prepares one data set, unless it is prepared already.

  Args:
    name: name of the data set, or 'folder'.
    data_dir: the TFDS directory; see `sources.tfds.default_data_dir`.
    source: archive, folder or other TFDS directory.
    set_name: name of a data set made from a folder.
    class_list: file of synsets in the order of labels, for imagenet21k.
    workers: number of processes; 0 for one per core, limited by memory.

  Raises:
    UserError: a flag, the source or the disk has to be changed.
  """
  root = default_data_dir(data_dir)
  own = (set_name or '') if name == folder.NAME else name
  _check_flags(name, own, source, set_name, class_list, workers)
  if paths.is_remote(root):
    raise UserError(
      f'--data_dir={root} is remote: prepare on a disk of this machine, then '
      f'copy: gcloud storage cp -r DIR/{own} {root}/'
    )
  place = pathlib.Path(root)
  workers = workers or parallel.default_workers()
  try:
    if name in _OWN and workspace.is_prepared(place, own):
      workspace.clean(place, own)
      log.info('%s is prepared already: %s', own, place / own)
    elif name == digits.NAME:
      digits.prepare(root)
      log.info('%s is prepared: %s', name, place / name)
    elif name == imagenet21k.NAME:
      imagenet21k.prepare(
        _path(source, 'fall11_whole.tar or winter21_whole.tar.gz'),
        place,
        class_list=pathlib.Path(class_list) if class_list else None,
        workers=workers,
      )
    elif name == folder.NAME:
      images = _path(source, 'a folder that holds CLASS/IMAGE')
      folder.prepare(images, place, own, workers=workers)
    else:
      from_there = _path(source, '') if source else None
      named.prepare(name, place, source=from_there, workers=workers)
  except OSError as error:
    raise UserError(_message(error, place)) from error


def _check_flags(
  name: str,
  own: str,
  source: str | None,
  set_name: str | None,
  class_list: str | None,
  workers: int,
) -> None:
  """Refuses flags that would be ignored."""
  if name == folder.NAME and not own:
    raise UserError(
      'a data set made of a folder needs a name: --name=my_set, by which '
      '--config.source.dataset will find it.'
    )
  if name == folder.NAME:
    folder.check_name(own)
  elif set_name is not None:
    raise UserError(f'--name={set_name} is for NAME folder, not {name}.')
  if class_list is not None and name != imagenet21k.NAME:
    raise UserError(f'--class_list is for imagenet21k, not {name}.')
  if source is not None and name == digits.NAME:
    raise UserError('digits comes with scikit-learn; it takes no --source.')
  if workers < 0:
    raise UserError(f'--workers={workers}: give 1 or more, or 0 for all cores.')


def _path(source: str | None, wanted: str) -> pathlib.Path:
  """Returns the local path that --source names."""
  if source is None:
    raise UserError(f'--source=PATH is missing: {wanted}.')
  if files.is_remote(source):
    raise UserError(
      f'--source={source} is remote: copy it to a disk of this machine first.'
    )
  return pathlib.Path(source).expanduser()


def _message(error: OSError, place: pathlib.Path) -> str:
  """Explains to the user why an operation on a file failed."""
  if error.errno in (errno.ENOSPC, errno.EDQUOT):
    return (
      f'the disk of {place} is full: make room (or give a --data_dir on a '
      'larger disk); the same command goes on.'
    )
  return (
    f'{error.filename or place} cannot be read or written: '
    f'{error.strerror or error}.'
  )


def main(arguments: list[str]) -> None:
  """Prepares the data set that is named; lists what is known without."""
  values = flags.FLAGS
  if not arguments:
    print(catalog.listing())
    return
  if len(arguments) > 1:
    raise UserError(
      'usage: python -m vit_jax.prepare NAME [--source=PATH] [--data_dir=DIR]; '
      f'got {len(arguments)} names: {" ".join(arguments)}.'
    )
  interruption.HERE.release()  # what is interrupted cleans up
  try:
    run(
      arguments[0],
      data_dir=values.data_dir,
      source=values.source,
      set_name=values.name,
      class_list=values.class_list,
      workers=values.workers,
    )
  except KeyboardInterrupt:
    raise UserError('interrupted; the same command goes on.') from None


if __name__ == '__main__':
  process.run(main, define_flags)
