"""Reads files, local or remote, from any number of threads."""

import errno
import functools
import os
import resource
from collections.abc import Sequence

from etils import epath

from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.files.paths import is_remote

IMAGES = tuple(  # usual endings of the formats that `decode` supports
  '.jpg .jpeg .jpe .jfif .png .gif .bmp .webp .tif .tiff'.split()
)

_NO_FILE = (  # errors of a single file; others concern the disk or network
  FileNotFoundError,
  PermissionError,
  IsADirectoryError,
  NotADirectoryError,
)
_SOURCES = 8  # sources among which the limit on open files is divided
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)


def place(path: str, key: str) -> str:
  """Expands ~ in a path that is local or begins with gs://.

  Args:
    path: path in the config.
    key: config key that contains the path, for the message.

  Raises:
    UserError: the path is another kind of address, or contains NUL.
  """
  remote = is_remote(path)
  if '\0' in path or (remote and not path.startswith('gs://')):
    raise UserError(
      f'--config.{key} is {path!r}; it must be a local path or begin with '
      'gs://: mount or copy data that is elsewhere.'
    )
  return path if remote else os.path.expanduser(path)


def local(path: str, what: str) -> str:
  """Returns a local path with ~ expanded.

  Args:
    path: path in the config.
    what: name of the reader that requires a local file system, for the message.

  Raises:
    UserError: the path is remote.
  """
  if is_remote(path):
    raise UserError(
      f'{path} is remote, but {what} needs a local directory: mount the bucket '
      '(gcsfuse), copy the data, or prepare it as an array_record data set '
      '(python -m vit_jax.prepare).'
    )
  return os.path.expanduser(path)


def join(folder: str, path: str) -> str:
  """Joins a folder and a path relative to it.

  Remote and absolute paths are returned unchanged.
  """
  if is_remote(path) or os.path.isabs(path):
    return path
  return f'{folder.rstrip("/")}/{path}' if folder else path


def read(path: str) -> bytes:
  """Reads a whole file.

  Raises:
    OSError: the file cannot be read.
  """
  if is_remote(path):
    return epath.Path(path).read_bytes()
  with open(path, 'rb') as file:
    return file.read()


def read_image(path: str) -> bytes:
  """Reads a whole image file.

  Raises:
    DecodeError: the file does not exist, or there is no permission to read it.
    OSError: the disk or the network fails.
  """
  try:
    return read(path)
  except OSError as error:
    if not isinstance(error, _NO_FILE) and error.errno not in _NO_PATH:
      raise
    raise DecodeError(f'no file to read: {error.strerror or error}') from error
  except ValueError as error:  # NUL in the path
    raise DecodeError(f'no file to read: {error}') from error


def read_text(path: str, key: str) -> str:
  """Reads a text file, and removes a byte order mark.

  Args:
    path: path of the file, local or remote.
    key: config key that contains the path, for the message.

  Raises:
    UserError: the file cannot be read, or is not UTF-8.
  """
  try:
    return read(place(path, key)).decode('utf-8-sig')
  except OSError as error:
    raise UserError(
      f'{path} cannot be read ({error.strerror or error}); --config.{key} '
      'refers to it.'
    ) from error
  except UnicodeDecodeError as error:
    raise UserError(f'{path} is not UTF-8 text: {error}.') from error


class _Descriptor:
  """An open file.

  It is closed when `Files` no longer keeps it and no thread is reading it.
  """

  def __init__(self, path: str):
    self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

  def __del__(self, close=os.close):
    if hasattr(self, 'number'):
      close(self.number)


class Files:
  """Files that are read in parts.

  They stay open, except that the least recently used ones are closed when many
  are open. An instance can be used by several threads and after a fork, because
  reading does not use a file position, and it can be pickled.

  Attributes:
    paths: paths of the files, local or remote.
  """

  def __init__(self, paths: Sequence[str]):
    self.paths = tuple(paths)
    # A process may read several sources at once.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SOURCES
    self._opened = functools.lru_cache(max(most, 1))(_Descriptor)

  def read(self, number: int, offset: int, size: int) -> bytes:
    """Reads a part of a file.

    Args:
      number: index of the file in `paths`.
      offset: offset of the part, bytes.
      size: size of the part, bytes.

    Raises:
      DecodeError: the file is too short, because it was changed after it was
        indexed.
    """
    path = self.paths[number]
    if is_remote(path):
      with epath.Path(path).open('rb') as file:
        file.seek(offset)
        data = file.read(size)
    else:
      descriptor = self._opened(path)  # stays open while it is referenced
      data = os.pread(descriptor.number, size, offset)
    if len(data) != size:
      raise DecodeError(
        f'the file ends within the {size} bytes at {offset}: it was changed '
        'after it was indexed'
      )
    return data

  def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
    return Files, (self.paths,)
