"""Reads files from any number of threads, and orders listings of them.

Files are local or remote.

Listings are mostly sorted by class, so that `train[:90%]` of a listing would
lack whole classes. Splits are therefore cut in a random but fixed order: the
order of the hashes of the examples' names, which does not depend on the order
of the listing. (TFDS shuffles when it prepares a dataset, so its splits are cut
in the order in which they are stored.)
"""

import errno
import functools
import os
import resource
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from etils import epath
from jaxtyping import Int, UInt64

from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline.order import mix
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
_SOURCES = 8  # sources among which the limit on open files is divided
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
_CHUNK = 1 << 20  # names hashed at once


def place(path: str) -> str:
  """Expands ~ in a path that is local or begins with gs://.

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
  """Returns an image of a user, or the reason why it cannot be used.

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
    return read(place(path)).decode('utf-8-sig')
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
      raise DecodeError(f'changed after indexing: no {size} bytes at {offset}')
    return data

  def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
    return Files, (self.paths,)


def by_name(names: np.ndarray) -> Int[np.ndarray, ' n']:
  """Returns the order of examples by the hashes of their names.

  Args:
    names: bytes `[n]`, without NUL.

  Returns:
    A permutation of 0 to n - 1.
  """
  return np.argsort(hashes(names), kind='stable')


def by_class(
  names: np.ndarray, classes: Int[np.ndarray, ' n']
) -> Int[np.ndarray, ' n']:
  """Returns an order in which every part has the same fraction of each class.

  The r-th of the n images of a class (r from 0, in the order of their hashes)
  is at the fraction r / n of the split. `[:90%]` and `[90%:]` therefore divide
  each class in this proportion, up to one image. A part that starts at 0 gets
  an image of every class before it gets a second one of any class, so that it
  contains the classes that are too small to be divided.

  Args:
    names: bytes `[n]`, without NUL.
    classes: class of each example, `[n]`.

  Returns:
    A permutation of 0 to n - 1.
  """
  hashed = hashes(names)
  order = np.lexsort((hashed, classes))
  _, starts, counts = np.unique(
    classes[order], return_index=True, return_counts=True
  )
  rank = np.arange(len(names)) - np.repeat(starts, counts)
  fraction = np.empty(len(names))
  fraction[order] = rank / np.repeat(counts, counts)
  return np.lexsort((hashed, fraction))


def by_place(
  paths: Sequence[str],
  file: Int[np.ndarray, ' n'],
  place: Int[np.ndarray, ' n'],
) -> Int[np.ndarray, ' n']:
  """Returns the order of examples without names, by hashes of their positions.

  Args:
    paths: paths of the files; only the last part of each is used.
    file: index of the file of each example.
    place: position of each example in its file, a row or an offset.

  Returns:
    A permutation of 0 to n - 1.
  """
  files = hashes(base_names(paths))[file]
  places = mix(place.astype(np.uint64) + np.uint64(1))
  return np.argsort(mix(files ^ places), kind='stable')


def base_names(paths: Sequence[str]) -> np.ndarray:
  """Returns the last part of each path, as bytes `[n]`."""
  return np.array([os.fsencode(p.rpartition('/')[2]) for p in paths], np.bytes_)


def hashes(names: np.ndarray) -> UInt64[np.ndarray, ' n']:
  """Computes a hash of each name.

  The hash depends only on the bytes of the name, not on the array's width.

  Args:
    names: bytes `[n]`, without NUL.
  """
  if len(names) > _CHUNK:
    parts = np.array_split(names, -(-len(names) // _CHUNK))
    return np.concatenate([hashes(part) for part in parts])
  words = names.astype(f'S{-(-names.itemsize // 8) * 8}').view('<u8')
  hashed = np.zeros(len(names), np.uint64)
  for column in words.reshape(len(names), -1).T:
    # A word of zeros is padding after the name, and must not change the hash.
    hashed = np.where(column == 0, hashed, mix(hashed ^ column))
  return hashed
