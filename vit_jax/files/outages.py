"""What to do about files and objects that cannot be read or written.

A cause that the user can fix (a directory that was removed, a missing
permission) becomes a `UserError`: starting again would end in the same way.
Everything else is the storage's: what may pass is tried again for about a
minute, and then becomes a `StorageError`, after which launchers start again.
"""

import contextlib
import enum
import errno
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from etils import epath

from vit_jax.errors import StorageError, UserError
from vit_jax.files import paths

log = logging.getLogger('vit_jax')
T = TypeVar('T')
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts
# Clients of object stores try again by themselves, for 40 s and longer. No
# attempt begins after this time, so that the watchdog's limit is not reached.
_PATIENCE_S = 60.0

_USERS = {
  errno.EACCES,
  errno.EPERM,
  errno.EROFS,
  errno.ENOENT,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.ENAMETOOLONG,
  errno.ELOOP,
  errno.EINVAL,
  errno.EEXIST,
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
# HTTP: a wrong request, no or wrong credentials, no permission, not found.
_USERS_STATUS = {400, 401, 403, 404}


class Cause(enum.Enum):
  """Who can do something about an error, and how."""

  USER = 'the user, by changing a path or a permission'
  FULL = 'the user or another process, by freeing space'
  OUTAGE = 'nobody, but it may pass'


def cause(error: BaseException) -> Cause:
  """Returns the cause of an error from a file system or an object store."""
  if isinstance(error, FileNotFoundError | PermissionError):
    return Cause.USER
  status = getattr(error, 'code', None)  # of gcsfs's HttpError
  if status in _USERS_STATUS or str(error).startswith('Forbidden'):
    return Cause.USER
  if type(error).__name__ in ('DefaultCredentialsError', 'RefreshError'):
    return Cause.USER
  number = error.errno if isinstance(error, OSError) else None
  if number in _FULL:
    return Cause.FULL
  return Cause.USER if number in _USERS else Cause.OUTAGE


def _is_storages(error: Exception, path: epath.Path) -> bool:
  """Returns whether an error comes from the storage, not from a mistake.

  Clients of object stores raise errors of their own kinds, so any error counts
  for a remote path.
  """
  return isinstance(error, OSError) or paths.is_remote(path)


def reason(error: Exception) -> str:
  """Returns the cause of an error in one line, in the system's words."""
  number = getattr(error, 'errno', None)
  if isinstance(number, int) and not isinstance(error, ConnectionError):
    with contextlib.suppress(ValueError):
      return os.strerror(number)
  return paths.reason(error)


@contextlib.contextmanager
def access(path: epath.Path, doing: str) -> Iterator[None]:
  """Surrounds reading or writing a file of a run: failures become a message.

  Args:
    path: path of the file.
    doing: 'read' or 'written'.

  Raises:
    UserError: the directory is gone, or may not be used.
    StorageError: the storage is full or fails.
  """
  try:
    yield
  except (UserError, StorageError):
    raise
  except FileNotFoundError as error:
    raise UserError(
      f'{path} cannot be {doing}: its directory was removed or moved during '
      'the run. What is left of its checkpoints can be resumed from where it '
      'is now.'
    ) from error
  except Exception as error:
    if not _is_storages(error, path):
      raise
    kind = cause(error)
    message = f'{path} cannot be {doing}: {reason(error)}. '
    again = (
      'run the same command again: it resumes from the newest intact '
      'checkpoint.'
    )
    if kind is Cause.USER:
      raise UserError(
        f'{message}Fix its path or permissions and {again}'
      ) from (error)
    if kind is Cause.FULL:
      raise StorageError(f'{message}Free some space and {again}') from error
    raise StorageError(f'{message}When the storage is back, {again}') from error


def with_retries(
  function: Callable[[], T],
  path: epath.Path,
  doing: str,
  sleep: Callable[[float], None] | None = None,
) -> T:
  """Reads or writes a file, again after growing pauses if the storage fails.

  Args:
    function: function that reads or writes; may be called several times.
    path: path of the file, for messages.
    doing: 'read' or 'written'.
    sleep: function that waits for some seconds; by default `time.sleep`.

  Returns:
    What the function returns.

  Raises:
    UserError: the directory is gone, or may not be used.
    StorageError: the storage is full or keeps failing.
  """
  start = time.monotonic()
  for pause_s in PAUSES_S:
    try:
      return function()
    except Exception as error:  # noqa: BLE001 (`access` reports it at the end)
      temporary = _is_storages(error, path) and cause(error) is Cause.OUTAGE
      if not temporary or time.monotonic() - start > _PATIENCE_S:
        with access(path, doing):
          raise
      log.warning(
        '%s cannot be %s: %s. Trying again in %g s.',
        path,
        doing,
        reason(error),
        pause_s,
      )
    (sleep or time.sleep)(pause_s)
  with access(path, doing):
    return function()


def check_writable(folder: epath.Path) -> None:
  """Writes a small file in a workdir, reads it back and deletes it.

  Args:
    folder: the workdir, which is created if it does not exist.

  Raises:
    UserError: one of the three is not possible here.
    StorageError: the storage is full or does not answer.
  """
  content = uuid.uuid4().hex
  file, doing = folder / f'.vit_jax_try_{content}', 'written'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    doing = 'read back'
    if file.read_text() != content:
      raise OSError('what is read is not what was written')
    doing = 'deleted'
    file.unlink()
  except Exception as error:
    with contextlib.suppress(Exception):
      file.unlink(missing_ok=True)
    raise workdir_error(folder, f'a file in it cannot be {doing}', error) from (
      error
    )


def workdir_error(
  folder: epath.Path, problem: str, error: Exception
) -> UserError | StorageError:
  """Returns the error to report when a workdir cannot be used.

  Args:
    folder: the workdir.
    problem: description of the problem, a sentence without its period.
    error: the error of the file system or object store.
  """
  message = (
    f'the workdir {folder} cannot be used: {problem}: {paths.reason(error)}. '
  )
  kind = cause(error)
  if kind is Cause.USER:
    return UserError(
      f'{message}Check its name and your permissions (for gs://, `gcloud auth '
      'application-default login`), or give another --workdir.'
    )
  if kind is Cause.FULL:
    return StorageError(f'{message}Free some space and start again.')
  return StorageError(
    f'{message}Start again when the storage answers. What is saved there stays.'
  )
