"""Handles errors of file systems and object stores.

An error that the user must fix (a directory that was removed, a missing
permission) becomes a `UserError`, because a restart would fail in the same way.
After any other error, reading or writing is tried again for about a minute. If
it still fails, a `StorageError` is raised, after which launchers restart the
run.
"""

import contextlib
import enum
import errno
import logging
import os
import re
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
# No attempt starts after this time. Clients of object stores also retry, for
# 40 s and longer, and the total time must stay below the watchdog's limit.
_RETRY_S = 60.0

_USER_ERRNO = {
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
_FULL_ERRNO = {errno.ENOSPC, errno.EDQUOT}
# TensorStore raises ValueError for all errors, with the errno in its text.
_TENSORSTORE_ERRNO = re.compile(r"os_error_code='(\d+)'")
# HTTP: a wrong request, no or wrong credentials, no permission, not found.
_USER_STATUS = {400, 401, 403, 404}


class Cause(enum.Enum):
  """Cause of a storage error."""

  USER = 'a path or a permission, which the user must change'
  FULL = 'a full disk, on which space must be freed'
  OUTAGE = 'a failure of the storage, which may be temporary'


def cause(error: BaseException) -> Cause:
  """Returns the cause of an error from a file system or an object store."""
  if isinstance(error, FileNotFoundError | PermissionError):
    return Cause.USER
  status = getattr(error, 'code', None)  # attribute of gcsfs's HttpError
  if status in _USER_STATUS or str(error).startswith('Forbidden'):
    return Cause.USER
  if type(error).__name__ in ('DefaultCredentialsError', 'RefreshError'):
    return Cause.USER
  number = error_number(error)
  if number in _FULL_ERRNO:
    return Cause.FULL
  return Cause.USER if number in _USER_ERRNO else Cause.OUTAGE


def error_number(error: BaseException) -> int | None:
  """Returns the errno of an error of a file system; None if unknown."""
  if isinstance(error, OSError):
    return error.errno
  match = _TENSORSTORE_ERRNO.search(str(error))
  return int(match[1]) if match else None


def _is_storage_error(error: Exception, path: epath.Path) -> bool:
  """Returns whether an error comes from the storage, not from a bug.

  Clients of object stores raise their own types of errors, so for a remote path
  every error counts as one of the storage.
  """
  return isinstance(error, OSError) or paths.is_remote(path)


def reason(error: Exception) -> str:
  """Returns the cause of an error in one line, as the system describes it."""
  number = error_number(error)
  if number is not None and not isinstance(error, ConnectionError):
    with contextlib.suppress(ValueError):
      return os.strerror(number)
  return paths.reason(error)


@contextlib.contextmanager
def access(path: epath.Path, action: str) -> Iterator[None]:
  """Converts errors of file access to UserError or StorageError.

  Args:
    path: path of the file.
    action: 'read' or 'written'.

  Raises:
    UserError: the directory was removed, or there is no permission.
    StorageError: the storage is full or fails.
  """
  try:
    yield
  except (UserError, StorageError):
    raise
  except FileNotFoundError as error:
    raise UserError(
      f'{path} cannot be {action}: its directory was removed or moved during '
      'the run. If it was moved, resume with its new path as --workdir.'
    ) from error
  except Exception as error:
    if not _is_storage_error(error, path):
      raise
    kind = cause(error)
    message = f'{path} cannot be {action}: {reason(error)}. '
    advice = (
      'run the same command again: it resumes from the newest intact '
      'checkpoint.'
    )
    if kind is Cause.USER:
      raise UserError(
        f'{message}Fix its path or permissions and {advice}'
      ) from error
    if kind is Cause.FULL:
      raise StorageError(f'{message}Free some space and {advice}') from error
    raise StorageError(
      f'{message}When the storage is available again, {advice}'
    ) from error


def with_retries(
  function: Callable[[], T],
  path: epath.Path,
  action: str,
  sleep: Callable[[float], None] | None = None,
) -> T:
  """Reads or writes a file; tries again after pauses if the storage fails.

  Args:
    function: function that reads or writes; may be called several times.
    path: path of the file, for messages.
    action: 'read' or 'written'.
    sleep: function that waits for some seconds; by default `time.sleep`.

  Returns:
    The result of the function.

  Raises:
    UserError: the directory was removed, or there is no permission.
    StorageError: the storage is full or keeps failing.
  """
  start = time.monotonic()
  for pause_s in PAUSES_S:
    try:
      return function()
    except Exception as error:  # noqa: BLE001 (`access` reports it at the end)
      temporary = (
        _is_storage_error(error, path) and cause(error) is Cause.OUTAGE
      )
      if not temporary or time.monotonic() - start > _RETRY_S:
        with access(path, action):
          raise
      log.warning(
        '%s cannot be %s: %s. Trying again in %g s.',
        path,
        action,
        reason(error),
        pause_s,
      )
    (sleep or time.sleep)(pause_s)
  with access(path, action):
    return function()


def check_writable(folder: epath.Path) -> None:
  """Writes a small file in a workdir, reads it back and deletes it.

  Args:
    folder: the workdir, which is created if it does not exist.

  Raises:
    UserError: the path or the permissions do not allow it.
    StorageError: the storage is full or does not respond.
  """
  content = uuid.uuid4().hex
  file, action = folder / f'.vit_jax_try_{content}', 'written'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    action = 'read back'
    if file.read_text() != content:
      raise OSError('the content differs from what was written')
    action = 'deleted'
    file.unlink()
  except Exception as error:
    with contextlib.suppress(Exception):
      file.unlink(missing_ok=True)
    problem = f'a file in it cannot be {action}'
    raise workdir_error(folder, problem, error) from error


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
    f'{message}Start again when the storage responds. Saved files are not '
    'affected.'
  )
