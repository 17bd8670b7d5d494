"""Reads and writes local files and objects, 'gs://bucket/…'.

Objects are read and written through gcsfs. By default `etils.epath` uses
TensorFlow if it is installed; but TensorFlow cannot be tested with a local
server, and takes seconds to load. Objects cannot be appended to, so files that
grow are kept in memory, and each flush writes the complete file.

An error that the user must fix (a directory that was removed, a missing
permission) becomes a `UserError`, because a restart would fail in the same way.
A full disk is a `StorageError` at once. After any other error, reading or
writing is tried again for about a minute. If it still fails, a `StorageError`
is raised, after which launchers restart the run. Files are written atomically:
they are complete or absent after any crash.
"""

import contextlib
import difflib
import enum
import errno
import logging
import os
import re
import shutil
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

import fsspec.config
from etils import epath

from vit_jax.errors import StorageError, UserError

log = logging.getLogger('vit_jax')

# Endings of files of other formats. A directory to be written whose name has
# one of them was probably meant as such a file.
_FILE_ENDINGS = tuple(
  '.bin .ckpt .csv .gguf .h5 .hdf5 .html .jpeg .jpg .json .keras .mlmodel '
  '.msgpack .npy .npz .onnx .parquet .pb .pdf .pickle .pkl .png .pt .pth '
  '.safetensors .stablehlo .svg .tflite .zip'.split()
)
_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*):/')
# Source files of the clients of object stores, and of the libraries they use.
_CLIENT = re.compile(r'[\\/](gcsfs|google[\\/](auth|cloud|api_core))[\\/]')
_TRANSPORT = re.compile(r'[\\/](fsspec|aiohttp|requests)[\\/]')
_MAX_REASON, _MAX_NAME = 300, 200  # characters of a text in a message
T = TypeVar('T')
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts
# After this time, there is no further pause and attempt. Clients of object
# stores also retry, for 40 s and longer, and the total time must stay below the
# watchdog's limit.
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

# Objects are accessed through gcsfs, see above.
os.environ.setdefault('EPATH_USE_TF', '0')
# With its cache, gcsfs would return outdated listings when another process has
# written files.
fsspec.config.conf.setdefault('gcs', {}).setdefault('use_listings_cache', False)


def is_remote(path: str | epath.PathLike) -> bool:
  """Returns whether a path is the address of an object, 'gs://bucket/…'."""
  return '://' in os.fspath(path)


def locate(path: str | epath.PathLike) -> epath.Path:
  """Returns the absolute path of a local file, or an unchanged gs:// address.

  Args:
    path: local path, in which ~ is expanded, or 'gs://BUCKET/…'.

  Raises:
    UserError: the path is an address with another scheme, such as s3://.
  """
  text = os.fspath(path)
  scheme = _SCHEME.match(text)
  if scheme is None:
    return epath.Path(text).expanduser().absolute()
  if not re.match(r'gs://[^/]', text):
    raise UserError(
      f'{text} cannot be used as a path; allowed are local paths (./{text}) '
      'and gs://BUCKET/PATH: mount other stores as a directory.'
    )
  return epath.Path(text)


def check_folder_name(path: str, allowed: str) -> None:
  """Checks that the name of a new directory does not end like that of a file.

  Args:
    path: path of the directory, as the user gave it.
    allowed: what can be written, for the message.

  Raises:
    UserError: the name is probably that of a file in another format.
  """
  if path.lower().endswith(_FILE_ENDINGS):
    raise UserError(
      f'{path} ends like a file of another format; allowed: {allowed}.'
    )


def entries(folder: epath.Path) -> list[epath.Path]:
  """Lists a folder; returns [] if it is missing, as object stores do."""
  try:
    return list(folder.iterdir())
  except FileNotFoundError:
    return []


def nearest(path: str | epath.PathLike) -> str:
  """Returns ' Did you mean X?' for a path that does not exist, or ''.

  Only local folders are searched, because listing a bucket may take long.
  """
  if is_remote(path):
    return ''
  parent, name = os.path.split(os.fspath(path).rstrip('/'))
  try:
    names = {entry.name for entry in entries(locate(parent))} - {name}
  except OSError:  # a file, or a folder without the permission to list it
    return ''
  near = difflib.get_close_matches(name, sorted(names), n=1)
  return f' Did you mean {os.path.join(parent, near[0])}?' if near else ''


def reason(error: BaseException) -> str:
  """Returns an error in one line, with its type unless it is an OSError."""
  text = ' '.join(str(error).split())[:_MAX_REASON]
  if isinstance(error, OSError) and text:
    return text
  # TensorStore's texts end with the number, which may have been cut off.
  number = error_number(error)
  kind = type(error).__name__ if number is None else os.strerror(number)
  return f'{kind}: {text}'


def name_error(error: BaseException) -> UserError | None:
  """Returns the error to report if `error` concerns the name of a file.

  Args:
    error: any error that ends a command.

  Returns:
    The error to report; None if `error` does not concern a name.
  """
  text = str(error)
  is_not_utf8 = isinstance(error, UnicodeError) and 'surrogate' in text
  has_null = isinstance(error, ValueError) and 'embedded null' in text
  if not (is_not_utf8 or has_null):
    return None
  name = ascii(getattr(error, 'object', ''))[-_MAX_NAME:]
  return UserError(
    f'a path is not valid UTF-8, or contains a null character ({error} '
    f'{name}): rename the file or its folder, or correct the flag, key or '
    'list of files that contains it.'
  )


def object_store_error(error: BaseException) -> StorageError | None:
  """Returns the error to report if a client of an object store raised `error`.

  Clients of object stores raise errors of many types, including OSError and
  ValueError. They are recognized by the source file that raised them.

  Args:
    error: any error that ends a command.

  Returns:
    The error to report; None if `error` was not raised by such a client.
  """
  files = [
    frame.filename for frame in traceback.extract_tb(error.__traceback__)
  ]
  if not any(_CLIENT.search(file) for file in files):
    return None  # for example another user of aiohttp or requests
  # The last file raised the error.
  if not (_CLIENT.search(files[-1]) or _TRANSPORT.search(files[-1])):
    return None
  return StorageError(
    f'the object store did not respond as expected: {reason(error)}. Check the '
    'address (gs://BUCKET/PATH), the network, and your permissions (`gcloud '
    'auth application-default login`). Saved files are not affected, and the '
    'same command resumes from them.'
  )


class Cause(enum.Enum):
  """Cause of a storage error."""

  USER = 'a path or a permission, which the user must change'
  FULL = 'a full disk, on which space must be freed'
  OUTAGE = 'a failure of the storage, which may be temporary'


# Error to raise, and what the user must do first.
_REACTIONS = {
  Cause.USER: (
    UserError,
    'Fix the path or permissions (for gs://, `gcloud auth application-'
    'default login`), or give another path if the directory was moved',
  ),
  Cause.FULL: (StorageError, 'Free some space'),
  Cause.OUTAGE: (StorageError, 'Wait until the storage responds'),
}


def cause(error: BaseException) -> Cause:
  """Returns the cause of an error from a file system or an object store."""
  if isinstance(error, FileNotFoundError | PermissionError):
    return Cause.USER
  # gcsfs raises HttpError, which has the attribute `code`, and for status 403
  # OSError('Forbidden: …').
  status = getattr(error, 'code', None)
  if status in _USER_STATUS or str(error).startswith('Forbidden'):
    return Cause.USER
  # Errors of google.auth
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
  return isinstance(error, OSError) or is_remote(path)


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
  except Exception as error:
    if not _is_storage_error(error, path):
      raise
    raise storage_error(path, action, error) from error


def storage_error(
  path: epath.Path, action: str, error: Exception
) -> UserError | StorageError:
  """Returns the error to report when a path cannot be used.

  Args:
    path: path of a file or folder.
    action: what cannot be done, a participle such as 'read' or 'written'.
    error: the error of the file system or object store.
  """
  kind, advice = _REACTIONS[cause(error)]
  return kind(
    f'{path} cannot be {action}: {reason(error)}. {advice}, and run the same '
    'command again: it continues from what is saved and intact.'
  )


def with_retries(function: Callable[[], T], path: epath.Path, action: str) -> T:
  """Reads or writes a file; tries again after pauses if the storage fails.

  Args:
    function: function that reads or writes; may be called several times.
    path: path of the file, for messages.
    action: 'read' or 'written'.

  Returns:
    The result of the function.

  Raises:
    UserError: the directory was removed, or there is no permission.
    StorageError: the storage is full or keeps failing.
  """
  start = time.monotonic()
  for pause_s in PAUSES_S:
    with access(path, action):
      try:
        return function()
      except Exception as error:
        temporary = (
          _is_storage_error(error, path) and cause(error) is Cause.OUTAGE
        )
        if not temporary or time.monotonic() - start > _RETRY_S:
          raise
        log.warning(
          '%s cannot be %s: %s. Trying again in %g s.',
          path,
          action,
          reason(error),
          pause_s,
        )
    time.sleep(pause_s)
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
  file = folder / f'.vit_jax_try_{content}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    if file.read_text() != content:
      raise OSError('the content differs from what was written')
    file.unlink()
  except Exception as error:
    with contextlib.suppress(Exception):
      file.unlink(missing_ok=True)
    action = 'used: a file in it cannot be written, read back and deleted'
    raise storage_error(folder, action, error) from error


def write(path: epath.Path, content: str | bytes) -> None:
  """Writes a temporary file, syncs it to disk, and renames it.

  In an object store, the file is written directly, because an object appears
  when it is complete.

  Args:
    path: path of the file.
    content: new content of the file.

  Raises:
    OSError: the file cannot be written; its old content is unchanged.
  """
  data = content.encode() if isinstance(content, str) else content
  if is_remote(path):
    path.write_bytes(data)
    return
  with replacing(path) as temporary, open(temporary, 'wb') as file:
    file.write(data)


def save(path: epath.Path, content: str | bytes) -> None:
  """Writes a file with `write`, and creates its directory if necessary.

  Args:
    path: path of the file.
    content: new content of the file.

  Raises:
    UserError: the path or a permission is wrong.
    StorageError: the storage is full or fails.
  """

  def attempt() -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)

  with_retries(attempt, path, 'written')


@contextlib.contextmanager
def replacing(path: epath.Path) -> Iterator[str]:
  """Yields the path of an empty temporary file, which then replaces a file.

  Args:
    path: path of the local file to replace.

  Raises:
    OSError: see `write`.
  """
  parent, name = os.path.split(os.fspath(path))
  handle, temporary = tempfile.mkstemp(dir=parent, prefix=f'.{name}.')
  try:
    os.fchmod(handle, 0o644)  # mkstemp allows only its owner to read the file
    yield temporary
    # The content must be on disk before the new name is; otherwise the file
    # could be empty after a power failure.
    os.fsync(handle)
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    raise
  finally:
    os.close(handle)
  _sync(parent)


def locate_new(path: str | epath.PathLike) -> epath.Path:
  """Returns the path of a directory to be written; see `locate`.

  Raises:
    UserError: the path exists, or cannot be used; see `locate`.
  """
  folder = locate(path)
  if folder.exists():
    raise UserError(f'{path} exists: give a new directory.')
  return folder


@contextlib.contextmanager
def new_folder(path: epath.Path) -> Iterator[epath.Path]:
  """Yields a temporary directory, which then gets the name of a new one.

  In an object store, which has no directories to rename, it yields `path`.

  Args:
    path: path of the directory, which must not exist.

  Raises:
    OSError: a directory cannot be created or renamed.
  """
  if is_remote(path):
    yield path
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  parent, name = os.path.split(os.fspath(path))
  temporary = tempfile.mkdtemp(dir=parent, prefix=f'.{name}.')
  try:
    os.chmod(temporary, 0o755)  # mkdtemp allows only the owner to read it
    yield epath.Path(temporary)
    for folder, _, files in os.walk(temporary):
      for file in files:
        _sync(os.path.join(folder, file))
      _sync(folder)
    os.rename(temporary, path)
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise
  _sync(parent)


def _sync(path: str) -> None:
  """Makes sure that a file, or the names in a folder, are on disk."""
  with contextlib.suppress(OSError):  # some network file systems refuse it
    handle = os.open(path, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
