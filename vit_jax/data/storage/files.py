"""Reads local and remote files, whole or in parts, from many threads."""

import errno
import functools
import os
import resource
from collections.abc import Callable, Sequence
from typing import TypeVar

from etils import epath

from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.files.paths import is_remote, locate, nearest

T = TypeVar('T')

IMAGES = tuple(  # usual endings of the formats that `decode` supports
  '.jpg .jpeg .jpe .jfif .png .gif .bmp .webp .tif .tiff'.split()
)

_NO_FILE = (  # errors of a single file; others concern the disk or network
  FileNotFoundError,
  PermissionError,
  IsADirectoryError,
  NotADirectoryError,
)
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
_SOURCES = 8  # sources among which the limit on open files is divided


def expanded(path: str) -> str:
  """Returns a local path with ~ expanded, or an unchanged gs:// address.

  Raises:
    UserError: the path is another kind of address.
  """
  locate(path)  # checks the address
  return path if is_remote(path) else os.path.expanduser(path)


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
      f'{path} is remote; {what} needs a local path: mount it (gcsfuse).'
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
    DecodeError: the file does not exist, there is no permission to read it, or
      the path contains a null character.
    OSError: the disk or the network fails.
  """
  try:
    return read(path)
  except ValueError as error:
    raise DecodeError(f'no path of a file: {error}') from error
  except OSError as error:
    if not isinstance(error, _NO_FILE) and error.errno not in _NO_PATH:
      raise
    raise DecodeError(f'no file to read: {error.strerror or error}') from error


def loaded(path: str, load: Callable[[bytes], T]) -> T | str:
  """Returns an image that a user names, or the reason why it cannot be used.

  Args:
    path: path of the file, local or remote.
    load: function of the content of the file, which may raise DecodeError.

  Returns:
    The result of `load`, or text that completes the sentence '{path} …'.
  """
  try:
    return load(locate(path).read_bytes())
  except OSError as error:
    return f'cannot be read: {error}.{nearest(path)}'
  except DecodeError as error:
    return f'is not an image that can be decoded: {error}.'


def read_other(path: str) -> bytes:
  """Reads a file that belongs to an image, such as its mask.

  Raises:
    DecodeError: the file cannot be read, see `read_image`; the message contains
      its path, because an example is otherwise identified by its image.
    OSError: the disk or the network fails.
  """
  try:
    return read_image(path)
  except DecodeError as error:
    raise DecodeError(f'{path}: {error}') from error


def read_text(path: str, key: str) -> str:
  """Reads a text file, and removes a byte order mark.

  Args:
    path: path of the file, local or remote.
    key: config key that contains the path, for the message.

  Raises:
    UserError: the file cannot be read, or is not UTF-8.
  """
  try:
    return read(expanded(path)).decode('utf-8-sig')
  except (OSError, ValueError) as error:
    raise UserError(
      f'--config.{key} is {path}, which cannot be read as UTF-8 text: {error}.'
    ) from error


class _Descriptor:
  """An open file.

  It is closed when `Files` no longer keeps it and no thread is reading it.
  """

  def __init__(self, path: str):
    self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

  # `close` is bound early, because `os` may be gone when the process ends.
  def __del__(self, close=os.close):
    if hasattr(self, 'number'):  # not if the file could not be opened
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
      raise DecodeError(f'changed after indexing: no {size} bytes at {offset}')
    return data

  def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
    return Files, (self.paths,)
