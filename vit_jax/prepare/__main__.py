"""Prepares data sets: python -m vit_jax.prepare NAME [--source=PATH].

NAME is one of:
  imagenet21k      made from the public archive (--source)
  digits           the handwritten digits of scikit-learn
  any data set of TFDS, which is downloaded
Without NAME, the command lists the known data sets.
"""

import errno
import logging
import pathlib
from typing import Any

from absl import flags

from vit_jax.cli import process
from vit_jax.data.sources import digits
from vit_jax.data.sources.tfds import default_data_dir
from vit_jax.errors import UserError, check_range
from vit_jax.files import paths
from vit_jax.prepare import imagenet21k, named, shards
from vit_jax.processes import interruption

log = logging.getLogger('vit_jax')
LISTING = pathlib.Path(__file__).with_name('listing.txt')  # known data sets
# Data sets that this package builds, and the flags that each of them uses.
_BUILT = {
  digits.NAME: (),
  shards.NAME: ('source', 'class_list'),
}
_SOURCE_HELP = 'the archive fall11_whole.tar or a directory of its tar files'


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string('source', None, f'{_SOURCE_HELP} (imagenet21k).')
  flags.DEFINE_string(
    'data_dir', None, 'TFDS directory; default $TFDS_DATA_DIR.'
  )
  flags.DEFINE_string(
    'class_list', None, 'File of synsets in the order of labels (imagenet21k).'
  )
  flags.DEFINE_integer('workers', 0, 'Number of processes; 0 for one per core.')


def run(
  name: str,
  *,
  data_dir: str | None = None,
  source: str | None = None,
  class_list: str | None = None,
  workers: int = 0,
) -> None:
  """Prepares a data set, unless it is already prepared.

  Args:
    name: name of the data set.
    data_dir: TFDS directory; see `sources.tfds.default_data_dir`.
    source: archive, or directory of its tar files.
    class_list: file of synsets in the order of labels, for imagenet21k.
    workers: number of processes; 0 for one per core, limited by memory.

  Raises:
    UserError: a flag is invalid, the source cannot be used, or the disk is
      full.
  """
  root = default_data_dir(data_dir)
  values = {'source': source, 'class_list': class_list}
  for flag, value in values.items():
    if value is not None and flag not in _BUILT.get(name, ()):
      raise UserError(f'--{flag}={value} has no effect for {name}; remove it.')
  check_range('--workers', workers, at_least=0)
  if source is not None and paths.is_remote(source):
    raise UserError(
      f'--source is {source!r}, which is remote; copy it to a local directory '
      f'DIR: gcloud storage cp -r {source} DIR/, and give --source=DIR/…'
    )
  if paths.is_remote(root):
    raise UserError(
      f'--data_dir is {root!r}, which is remote; give a local directory DIR, '
      f'and copy it: gcloud storage cp -r DIR/{name} {root}/'
    )
  directory = pathlib.Path(root)
  workers = workers or shards.default_workers()
  try:
    if name in _BUILT and shards.is_prepared(directory, name):
      shards.clean(directory, name)
      log.info('%s is already prepared: %s', name, directory / name)
    elif name == digits.NAME:
      digits.prepare(root)
      log.info('%s is prepared: %s', name, directory / name)
    elif name not in _BUILT:
      named.prepare(name, directory)
    elif not source:
      raise UserError(
        f'--source is missing; give {_SOURCE_HELP}, as --source=PATH.'
      )
    else:
      origin = pathlib.Path(source).expanduser()
      listed = pathlib.Path(class_list) if class_list else None
      imagenet21k.prepare(origin, directory, class_list=listed, workers=workers)
  except OSError as error:
    advice = 'fix the cause and run the same command again, which continues.'
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      advice = 'the disk is full: free some space, or give another --data_dir.'
    raise UserError(f'{error} (in {directory}): {advice}') from error


def main(arguments: list[str]) -> None:
  """Prepares a data set; without arguments, lists the known data sets."""
  if not arguments:
    print(LISTING.read_text(), end='')
    return
  if len(arguments) > 1:
    raise process.usage('prepare NAME [--source=PATH] [--data_dir=DIR]')
  # Ctrl-C must raise KeyboardInterrupt, so that worker processes are stopped.
  interruption.HANDLER.release()
  keys = ('data_dir', 'source', 'class_list', 'workers')
  values: dict[str, Any] = {key: flags.FLAGS[key].value for key in keys}
  try:
    run(arguments[0], **values)
  except KeyboardInterrupt:
    raise UserError('interrupted; the same command continues.') from None


if __name__ == '__main__':
  process.run(main, define_flags)
