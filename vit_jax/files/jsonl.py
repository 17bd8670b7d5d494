"""Reads and writes JSON lines; tolerates incomplete and damaged lines."""

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
  """Returns the JSON object in a line; None if the line is not an object."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # ValueError includes invalid UTF-8
    return None
  return record if isinstance(record, dict) else None


def _bytes(path: epath.Path) -> bytes:
  """Reads a file; returns b'' if it does not exist."""
  return with_retries(
    lambda: path.read_bytes() if path.exists() else b'', path, 'read'
  )


def read_object(path: epath.Path) -> Record:
  """Reads a file that consists of one JSON object.

  Returns:
    The object; {} if the file is missing or damaged.

  Raises:
    UserError: the file exists, but there is no permission to read it.
    StorageError: the file exists, but cannot be read.
  """
  return parse(_bytes(path)) or {}


def read(path: epath.Path) -> Iterator[tuple[bytes, Record | None]]:
  """Reads a file line by line; a missing file has no lines.

  Yields:
    Each line including its newline, and its object; None for a line that is not
    a JSON object.

  Raises:
    UserError: the file exists, but there is no permission to read it.
    StorageError: the file exists, but cannot be read.
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
    UserError: the directory was removed, or there is no permission to write it.
    StorageError: the storage is full or keeps failing.
  """

  def write() -> None:
    # Unbuffered, because after an error a buffered file would try to write the
    # remaining bytes again when it is closed.
    with open(path, 'a+b', buffering=0) as file:
      size = os.fstat(file.fileno()).st_size
      data = line.encode()
      # A failed attempt may have left a part of the line.
      if size and os.pread(file.fileno(), 1, size - 1) != b'\n':
        data = b'\n' + data
      while data:
        data = data[file.write(data) :]

  with_retries(write, path, 'written')


def keep(path: epath.Path, is_kept: Callable[[Record], bool]) -> list[bytes]:
  """Keeps the lines whose object passes a test, and quarantines all others.

  The other lines are first added to <name>_set_aside.jsonl, so no line is lost.
  If the last line lacks its newline, it is added, so that appended text starts
  a new line.

  Args:
    path: path of the file.
    is_kept: function that returns whether the line of an object is kept.

  Returns:
    The lines that were moved.

  Raises:
    UserError: there is no permission to read or write the files.
    StorageError: the storage is full or keeps failing.
  """
  kept, removed = [], []
  for line, record in read(path):
    (kept if record is not None and is_kept(record) else removed).append(line)
  if not removed and (not kept or kept[-1].endswith(b'\n')):
    return []
  if removed:
    quarantine = path.with_name(f'{path.stem}_set_aside.jsonl')
    content = _bytes(quarantine) + _join(removed)
    with_retries(
      lambda: atomic.write(quarantine, content), quarantine, 'written'
    )
  with_retries(lambda: atomic.write(path, _join(kept)), path, 'written')
  return removed


def _join(lines: list[bytes]) -> bytes:
  """Joins lines, each with exactly one newline at its end."""
  return b''.join(line.rstrip(b'\r\n') + b'\n' for line in lines)
