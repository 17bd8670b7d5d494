"""Reads and writes JSON lines; tolerates incomplete and damaged lines."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from vit_jax.files import paths
from vit_jax.files.paths import with_retries

log = logging.getLogger('vit_jax')
Record = dict[str, Any]


def parse(line: bytes) -> Record | None:
  """Returns the JSON object in a line; None if the line is not an object."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # ValueError includes invalid UTF-8
    return None
  return record if isinstance(record, dict) else None


def content(path: epath.Path) -> bytes:
  """Reads a file; returns b'' if it does not exist."""

  def read_bytes() -> bytes:
    try:
      return path.read_bytes()
    except FileNotFoundError:
      return b''

  return with_retries(read_bytes, path, 'read')


def read_object(path: epath.Path) -> Record:
  """Reads a file that consists of one JSON object.

  Returns:
    The object; {} if the file is missing or damaged.

  Raises:
    UserError: the file exists, but there is no permission to read it.
    StorageError: the file exists, but cannot be read.
  """
  return parse(content(path)) or {}


def read(path: epath.Path) -> Iterator[tuple[bytes, Record | None]]:
  """Reads a file line by line; a missing file has no lines.

  Yields:
    Each line including its newline, and its object; None for a line that is not
    a JSON object.

  Raises:
    UserError: the file exists, but there is no permission to read it.
    StorageError: the file exists, but cannot be read.
  """
  for line in content(path).splitlines(keepends=True):
    if line.strip():
      yield line, parse(line)


class Appender:
  """Appends JSON objects to a file of JSON lines.

  In an object store, files cannot be appended to. There, the lines are kept in
  memory, and `upload` writes the whole file.
  """

  def __init__(self, path: epath.Path):
    """Reads the existing lines of a file in an object store.

    Args:
      path: path of the file, which need not exist.

    Raises:
      UserError: there is no permission to read the file.
      StorageError: the file cannot be read.
    """
    self._path, self._is_remote = path, paths.is_remote(path)
    self._lines = [line for line, _ in read(path)] if self._is_remote else []

  def append(self, record: Record) -> None:
    """Appends a line to a local file, or to the lines that `upload` writes.

    A local file is created if it does not exist.

    Args:
      record: the object of the line.

    Raises:
      UserError: the directory was removed, or there is no permission.
      StorageError: the storage is full or keeps failing.
    """
    line = json.dumps(record).encode() + b'\n'

    def write() -> None:
      # Unbuffered, because after an error a buffered file would try to write
      # the remaining bytes again when it is closed.
      with open(self._path, 'a+b', buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        # A failed attempt may have left a part of the line.
        is_complete = not size or os.pread(file.fileno(), 1, size - 1) == b'\n'
        data = line if is_complete else b'\n' + line
        while data:
          data = data[file.write(data) :]

    if self._is_remote:
      self._lines.append(line)
    else:
      with_retries(write, self._path, 'written')

  def upload(self) -> None:
    """Writes a file in an object store; does nothing for a local file.

    Raises:
      UserError: there is no permission to write the file.
      StorageError: the storage keeps failing.
    """
    if self._is_remote:
      content = b''.join(self._lines)
      with_retries(
        lambda: self._path.write_bytes(content), self._path, 'written'
      )

  def sync(self) -> None:
    """Makes sure that all lines are in the object store or on disk.

    Raises:
      UserError: the directory was removed, or there is no permission.
      StorageError: the storage is full or keeps failing.
    """

    def sync_file() -> None:
      with open(self._path, 'rb') as file:
        os.fsync(file.fileno())

    if self._is_remote:
      self.upload()
    else:
      with_retries(sync_file, self._path, 'written')


def keep(
  path: epath.Path,
  is_kept: Callable[[Record], bool],
  is_valid: Callable[[Record], bool] = lambda record: False,
) -> None:
  """Keeps the lines whose object passes a test, and quarantines all others.

  The other lines are first added to <name>_set_aside.jsonl, so no line is lost.
  A missing newline at the end of the file is added, so that appended text
  starts a new line.

  Args:
    path: path of the file.
    is_kept: function that returns whether the line of an object is kept.
    is_valid: function that returns whether the object of a line that is not
      kept is intact; a warning counts the others. By default, none is.

  Raises:
    UserError: there is no permission to read or write the files.
    StorageError: the storage is full or keeps failing.
  """
  kept, removed = [], []
  for line, record in read(path):
    (kept if record is not None and is_kept(record) else removed).append(line)
  if not removed and (not kept or kept[-1].endswith(b'\n')):
    return
  if removed:
    quarantine = path.with_name(f'{path.stem}_set_aside.jsonl')
    paths.save(quarantine, content(quarantine) + _join(removed))
  damaged = [line for line in removed if not is_valid(parse(line) or {})]
  if damaged:
    log.warning(
      '%s: %d damaged or foreign line(s) moved to %s_set_aside.jsonl, the '
      'first %r',
      path,
      len(damaged),
      path.stem,
      damaged[0][:100],
    )
  paths.save(path, _join(kept))


def _join(lines: list[bytes]) -> bytes:
  """Joins lines, each with exactly one newline at its end."""
  return b''.join(line.rstrip(b'\r\n') + b'\n' for line in lines)
