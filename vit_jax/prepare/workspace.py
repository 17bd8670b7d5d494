"""Working directory of a preparation, and publication of its result.

DATA_DIR/.prepare/NAME belongs to one user and is locked during a preparation.
It is kept after an interruption, so that the same command can continue. The
complete result is renamed to its final path, so that a data set is complete as
soon as it exists.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator

from vit_jax.errors import UserError

VERSION = '1.0.0'
_FOLDER = '.prepare'


def is_prepared(data_dir: pathlib.Path, name: str) -> bool:
  """Returns whether a data set that this package builds exists."""
  return (data_dir / name / VERSION / 'dataset_info.json').exists()


def clean(data_dir: pathlib.Path, name: str) -> None:
  """Removes the working directory of a finished data set, if it still exists.

  Raises:
    UserError: another process has locked the directory.
  """
  if (data_dir / _FOLDER / name).exists():
    with locked(data_dir, name) as work:
      shutil.rmtree(work)


@contextlib.contextmanager
def locked(data_dir: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
  """Locks the working directory of a data set and yields its path.

  Raises:
    UserError: another process has locked the directory, or it belongs to
      another user.
    OSError: the directory cannot be written.
  """
  root = data_dir / _FOLDER
  root.mkdir(parents=True, exist_ok=True)
  work = root / name
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
  with open(os.open(root / f'{name}.lock', flags, 0o644), 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(
        f'another process is preparing {name} in {data_dir}; wait for it, or '
        'end it and run the same command again, which continues.'
      ) from error
    work.mkdir(mode=0o700, exist_ok=True)
    if work.lstat().st_uid != os.getuid():
      raise UserError(
        f'{work} belongs to another user, who has started to prepare {name}; '
        'let them finish, remove it, or give another --data_dir.'
      )
    yield work


def require_space(work: pathlib.Path, num_bytes: int) -> None:
  """Checks that the disk has enough space for a preparation.

  Args:
    work: working directory, whose files count as part of the space needed.
    num_bytes: space needed in total, bytes.

  Raises:
    UserError: the disk is too full; the message contains the space needed.
  """
  existing = sum(p.stat().st_size for p in work.rglob('*') if p.is_file())
  free = shutil.disk_usage(work).free
  if free < num_bytes - existing:
    raise UserError(
      f'the disk of {work.parent.parent} has {free / 1e9:,.1f} GB free; '
      f'{(num_bytes - existing) / 1e9:,.1f} GB are needed. Free some space, or '
      'give a --data_dir on a larger disk.'
    )


def publish(work: pathlib.Path, result: pathlib.Path, target: pathlib.Path):
  """Moves the result to its final path and removes the working directory.

  Raises:
    UserError: the target exists.
  """
  target.parent.mkdir(parents=True, exist_ok=True)
  try:
    os.rename(result, target)
  except OSError as error:
    raise UserError(
      f'{target} exists and is not a complete data set; move it elsewhere, '
      'then run the same command again.'
    ) from error
  shutil.rmtree(work)
