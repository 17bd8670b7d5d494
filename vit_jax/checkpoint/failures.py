"""Classifies errors from reading a step: damage, storage or permission."""

import builtins
import enum
import errno
import re

from vit_jax.checkpoint.items import CorruptError
from vit_jax.errors import UserError
from vit_jax.files.outages import PAUSES_S as PAUSES_S

_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL}
_DENIED = {errno.EACCES, errno.EPERM}
# TensorStore raises ValueError for everything, with a status before the text.
_STATUS = re.compile(r'([A-Z]+(?:_[A-Z]+)*): ')
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_DAMAGE_STATUS = {
  'DATA_LOSS',
  'OUT_OF_RANGE',
  'FAILED_PRECONDITION',
  'NOT_FOUND',
  'INVALID_ARGUMENT',
  'UNIMPLEMENTED',
}
_DENIED_STATUS = {'PERMISSION_DENIED', 'UNAUTHENTICATED'}


class Verdict(enum.IntEnum):
  """What an error says about a step; the highest of all processes counts."""

  WHOLE = 0
  DAMAGED = 1  # it was read, but is not what was written
  UNREADABLE = 2  # the storage failed, perhaps for a moment
  DENIED = 3  # it may not be read
  REFUSED = 4  # it is intact, but this run cannot go on from it


def judge(error: Exception) -> Verdict:
  """Returns what an exception from reading a step says about the step."""
  if isinstance(error, UserError):
    return Verdict.REFUSED
  root: BaseException = error
  while root.__cause__ is not None and not isinstance(root, CorruptError):
    root = root.__cause__
  if isinstance(root, CorruptError):
    return Verdict.DAMAGED
  if isinstance(root, FileNotFoundError | NotADirectoryError):
    return Verdict.DAMAGED  # Orbax raises some of these without an errno
  if isinstance(root, OSError):
    return _by_number(root.errno)
  by_status = _by_status(str(root))
  if by_status is not None:
    return by_status
  # Parsers of damaged files raise Python's own errors. Clients of object stores
  # define their own, which mean an outage.
  own = getattr(builtins, type(root).__name__, None) is type(root)
  parses = own or isinstance(root, ValueError)
  is_memory = isinstance(root, MemoryError)
  return Verdict.DAMAGED if parses and not is_memory else Verdict.UNREADABLE


def _by_status(text: str) -> Verdict | None:
  """Classifies the text of a TensorStore error; None if it is not one."""
  number, status = _OS_ERROR.search(text), _STATUS.match(text)
  if number is not None:
    return _by_number(int(number[1]))
  if status is None:
    return None
  if status[1] in _DAMAGE_STATUS:
    return Verdict.DAMAGED
  denied = status[1] in _DENIED_STATUS
  return Verdict.DENIED if denied else Verdict.UNREADABLE


def _by_number(number: int | None) -> Verdict:
  """Classifies an errno."""
  if number in _DENIED:
    return Verdict.DENIED
  return Verdict.DAMAGED if number in _DAMAGE else Verdict.UNREADABLE
