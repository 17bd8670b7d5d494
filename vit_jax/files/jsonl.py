"""Files of JSON lines, as crashes, full disks and people leave them behind."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from vit_jax.errors import UserError
from vit_jax.files import atomic, paths

Record = dict[str, Any]


def parse(line: bytes) -> Record | None:
  """The object that a line holds, or None if it holds none."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # no UTF-8 is a ValueError too
    return None
  return record if isinstance(record, dict) else None


def read_object(path: epath.Path) -> Record:
  """The object that a whole file holds; {} where there is none, or damage.

  Raises:
    UserError: it is there and cannot be read.
  """
  with access(path, 'read'):
    return (parse(path.read_bytes()) or {}) if path.exists() else {}


def read(path: epath.Path) -> Iterator[tuple[bytes, Record | None]]:
  """Each line with its end, and its object; nothing where there is no file.

  Raises:
    UserError: it is there and cannot be read.
  """
  with access(path, 'read'):
    data = path.read_bytes() if path.exists() else b''
  for line in data.splitlines(keepends=True):
    if line.strip():
      yield line, parse(line)


def keep(path: epath.Path, stays: Callable[[Record], bool]) -> list[bytes]:
  """Leaves the lines whose object stays, and moves all others aside.

  They are added to <name>_set_aside.jsonl first, so none is ever lost. A last
  line without its end gets one, so that what is appended begins a new line.

  Returns:
    The lines that were moved.

  Raises:
    UserError: the files cannot be read or written.
  """
  kept, gone = [], []
  for line, record in read(path):
    (kept if record is not None and stays(record) else gone).append(line)
  if not gone and (not kept or kept[-1].endswith(b'\n')):
    return []
  with access(path, 'written'):
    if gone:
      aside = path.with_name(f'{path.stem}_set_aside.jsonl')
      before = aside.read_bytes() if aside.exists() else b''
      atomic.write(aside, before + _joined(gone))
    atomic.write(path, _joined(kept))
  return gone


def _joined(lines: list[bytes]) -> bytes:
  return b''.join(line.rstrip(b'\r\n') + b'\n' for line in lines)


@contextlib.contextmanager
def access(path: epath.Path, doing: str) -> Iterator[None]:
  """Around reading or writing a file of a run: failures become a message.

  Args:
    path: of the file.
    doing: 'read' or 'written'.

  Raises:
    UserError: what the file system, or an object store, raised inside.
  """
  try:
    yield
  except FileNotFoundError as error:
    raise UserError(
      f'{path} cannot be {doing}: its directory was removed or moved while the '
      'run was going on. What is left of its checkpoints can be resumed where '
      'it is now.'
    ) from error
  except Exception as error:
    if not isinstance(error, OSError) and not paths.is_remote(path):
      raise  # an object store has errors of its own
    number = getattr(error, 'errno', None)
    reason = os.strerror(number) if isinstance(number, int) else str(error)
    raise UserError(
      f'{path} cannot be {doing}: {reason}. Make room or mend the place, and '
      'run the same command again: it resumes from the newest whole checkpoint.'
    ) from error
