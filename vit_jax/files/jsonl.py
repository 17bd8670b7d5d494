"""Files of JSON lines, as crashes, full disks and people leave them behind."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from vit_jax.files import atomic
from vit_jax.files.outages import access as access
from vit_jax.files.outages import with_retries

Record = dict[str, Any]


def parse(line: bytes) -> Record | None:
  """Returns the JSON object in a line; None if the line holds none."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError too
    return None
  return record if isinstance(record, dict) else None


def _bytes(path: epath.Path) -> bytes:
  """Reads a file; returns b'' if there is none."""
  return with_retries(
    lambda: path.read_bytes() if path.exists() else b'', path, 'read'
  )


def read_object(path: epath.Path) -> Record:
  """Reads a file that holds one JSON object.

  Returns:
    The object; {} if the file is missing or damaged.

  Raises:
    UserError: it exists and may not be read.
    StorageError: it exists and cannot be read.
  """
  return parse(_bytes(path)) or {}


def read(path: epath.Path) -> Iterator[tuple[bytes, Record | None]]:
  """Reads a file line by line; a missing file has no lines.

  Yields:
    Each line with its end, and its object, or None if it holds none.

  Raises:
    UserError: it exists and may not be read.
    StorageError: it exists and cannot be read.
  """
  for line in _bytes(path).splitlines(keepends=True):
    if line.strip():
      yield line, parse(line)


def append(path: epath.Path, line: str) -> None:
  """Appends one line to a local file, again if the storage fails.

  Args:
    path: path of the file, which is created if it does not exist.
    line: text that ends with a newline.

  Raises:
    UserError: the directory is gone, or may not be written.
    StorageError: the storage is full or keeps failing.
  """

  def write() -> None:
    # Unbuffered: a buffer would write its rest, once more, when it is closed.
    with open(path, 'a+b', buffering=0) as file:
      size = os.fstat(file.fileno()).st_size
      data = line.encode()
      # A failed attempt may have left a part of the line.
      if size and os.pread(file.fileno(), 1, size - 1) != b'\n':
        data = b'\n' + data
      while data:
        data = data[file.write(data) :]

  with_retries(write, path, 'written')


def keep(path: epath.Path, stays: Callable[[Record], bool]) -> list[bytes]:
  """Keeps the lines whose object passes a test, and quarantines all others.

  The others are added to <name>_set_aside.jsonl first, so none is ever lost. A
  last line without its newline gets one, so that what is appended begins a new
  line.

  Args:
    path: path of the file.
    stays: function that returns whether the line of an object is kept.

  Returns:
    The lines that were moved.

  Raises:
    UserError: the files may not be read or written.
    StorageError: the storage is full or keeps failing.
  """
  kept, gone = [], []
  for line, record in read(path):
    (kept if record is not None and stays(record) else gone).append(line)
  if not gone and (not kept or kept[-1].endswith(b'\n')):
    return []
  if gone:
    aside = path.with_name(f'{path.stem}_set_aside.jsonl')
    content = _bytes(aside) + _joined(gone)
    with_retries(lambda: atomic.write(aside, content), aside, 'written')
  with_retries(lambda: atomic.write(path, _joined(kept)), path, 'written')
  return gone


def _joined(lines: list[bytes]) -> bytes:
  return b''.join(line.rstrip(b'\r\n') + b'\n' for line in lines)
