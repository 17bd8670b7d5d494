"""Columns in an .npz file that are written in parts and mapped into memory."""

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy

# A constant date, so that equal columns give equal files.
_DATE = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER = 30  # bytes before the name of a member


def write(
  path: str,
  columns: Mapping[str, Callable[[], Iterable[np.ndarray]]],
  texts: Mapping[str, Any],
) -> None:
  """Writes an .npz file without compression.

  Args:
    path: local path of the file, which is not written atomically.
    columns: by name, a function that returns the parts of a column along the
      first axis, in order. It is called twice, so that a column may be larger
      than the memory.
    texts: strings, or lists of strings, by name.
  """
  with zipfile.ZipFile(path, 'w') as archive:
    for key, parts in columns.items():
      sizes = [(part.dtype, part.shape) for part in parts()]
      # The dtype of strings contains the length of the longest one.
      dtype = np.result_type(*{dtype for dtype, _ in sizes})
      rows = sum(shape[0] for _, shape in sizes)
      header = {
        'descr': npy.dtype_to_descr(dtype),
        'fortran_order': False,
        'shape': (rows, *sizes[0][1][1:]),
      }
      with archive.open(_entry(key), 'w', force_zip64=True) as file:
        npy.write_array_header_2_0(file, header)
        for part in parts():
          file.write(part.astype(dtype).tobytes())
    for key, value in texts.items():
      with archive.open(_entry(key), 'w') as file:
        npy.write_array(file, np.array(value, np.str_), allow_pickle=False)


@contextlib.contextmanager
def readable() -> Iterator[None]:
  """Converts the errors of archives that cannot be read to ValueError.

  Raises:
    ValueError: a member is missing, compressed in an unknown way, encrypted or
      damaged; or the file is not an archive.
  """
  try:
    yield
  except OSError:
    raise
  except Exception as error:  # noqa: BLE001 (damaged archives raise many kinds)
    raise ValueError(str(error)) from error


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
  """Opens an archive, and yields its columns by name.

  Args:
    path: local path of the file.

  Raises:
    OSError: the file cannot be read.
    ValueError: see `readable`.
  """
  # NumPy does not close a file that it opened and could not read.
  with readable(), open(path, 'rb') as file, np.load(file) as columns:
    yield columns


def about(path: str) -> tuple[dict[str, Any], list[str]]:
  """Reads the description in a file, and the names of its columns.

  Args:
    path: local path of the file.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file has no description, or cannot be read.
  """
  with opened(path) as columns:
    found = json.loads(str(columns['about']))
    if not isinstance(found, dict):
      raise ValueError("its column 'about' is not a JSON object")
    return found, list(columns.files)


def check(path: str) -> None:
  """Compares the content of a file with its checksums, by reading all of it.

  Args:
    path: local path of the file.

  Raises:
    ValueError: a column is damaged, or cannot be read.
  """
  with readable(), zipfile.ZipFile(path) as archive:
    damaged = archive.testzip()
  if damaged:
    raise ValueError(f'the checksum of {damaged} differs')


class Mapped:
  """A column of a file that `write` wrote, mapped into memory.

  It is pickled as path and name; the receiving process maps the file again.
  """

  def __init__(self, path: str, key: str):
    """Maps the column.

    Args:
      path: local path of the file.
      key: name of the column.

    Raises:
      KeyError: the file does not have the column.
      ValueError: the column is compressed.
    """
    self._arguments = path, key
    with zipfile.ZipFile(path) as archive:
      info = archive.getinfo(f'{key}.npy')
      if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f'its column {key!r} is compressed')
      with archive.open(info) as member:
        npy.read_magic(member)
        shape, _, dtype = npy.read_array_header_2_0(member)
        header = member.tell()
    with open(path, 'rb') as file:
      file.seek(info.header_offset + _LOCAL_HEADER - 4)
      lengths = np.frombuffer(file.read(4), '<u2')  # of name and extra field
    start = info.header_offset + _LOCAL_HEADER + int(lengths.sum()) + header
    self._rows = np.memmap(path, dtype, 'r', start, shape)

  def __reduce__(self) -> tuple[Any, ...]:
    return Mapped, self._arguments

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, row: int) -> np.ndarray:
    return np.array(self._rows[row])


def _entry(key: str) -> zipfile.ZipInfo:
  return zipfile.ZipInfo(f'{key}.npy', _DATE)
