"""Classifies errors from reading a step: damage, storage or permission."""

import builtins
import enum
import errno
import re

from vit_jax.checkpoint.items import CorruptError
from vit_jax.errors import UserError
from vit_jax.files import outages

_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL}
_DENIED = {errno.EACCES, errno.EPERM}
# TensorStore raises ValueError for all errors; the text begins with a status.
_STATUS = re.compile(r'([A-Z]+(?:_[A-Z]+)*): ')
_DAMAGE_STATUS = {
  'DATA_LOSS',
  'OUT_OF_RANGE',
  'FAILED_PRECONDITION',
  'NOT_FOUND',
  'INVALID_ARGUMENT',
  'UNIMPLEMENTED',
}
_DENIED_STATUS = {'PERMISSION_DENIED', 'UNAUTHENTICATED'}


class Outcome(enum.IntEnum):
  """Outcome of reading a step; the worst (highest) of all processes counts."""

  INTACT = 0
  DAMAGED = 1  # the content differs from what was written
  UNREADABLE = 2  # the storage failed, perhaps only temporarily
  DENIED = 3  # there is no permission to read the step
  REFUSED = 4  # the step is intact, but this run cannot resume from it


def classify(error: Exception) -> Outcome:
  """Classifies an exception that was raised when a checkpoint step was read."""
  if isinstance(error, UserError):
    return Outcome.REFUSED
  root: BaseException = error
  while root.__cause__ is not None and not isinstance(root, CorruptError):
    root = root.__cause__
  if isinstance(root, CorruptError):
    return Outcome.DAMAGED
  if isinstance(root, FileNotFoundError | NotADirectoryError):
    return Outcome.DAMAGED  # Orbax raises some of these without an errno
  number = outages.error_number(root)
  if isinstance(root, OSError) or number is not None:
    return _by_number(number)
  by_status = _by_status(str(root))
  if by_status is not None:
    return by_status
  # Parsers of damaged files raise built-in exceptions. Clients of object stores
  # define their own exceptions, which mean an outage.
  is_builtin = getattr(builtins, type(root).__name__, None) is type(root)
  is_parsing = is_builtin or isinstance(root, ValueError)
  if is_parsing and not isinstance(root, MemoryError):
    return Outcome.DAMAGED
  return Outcome.UNREADABLE


def _by_status(text: str) -> Outcome | None:
  """Classifies the status in a TensorStore error; None for any other text."""
  status = _STATUS.match(text)
  if status is None:
    return None
  if status[1] in _DAMAGE_STATUS:
    return Outcome.DAMAGED
  denied = status[1] in _DENIED_STATUS
  return Outcome.DENIED if denied else Outcome.UNREADABLE


def _by_number(number: int | None) -> Outcome:
  """Classifies an errno."""
  if number in _DENIED:
    return Outcome.DENIED
  return Outcome.DAMAGED if number in _DAMAGE else Outcome.UNREADABLE
