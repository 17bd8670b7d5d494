"""Reads files on all processes: either all succeed, or all raise an error.

Each process reads its files by itself. If only one of them failed, the others
would wait for it in the next collective. So the processes exchange whether they
succeeded (`on_all`), and if one of them failed, all raise an error. All
processes must make the same calls, in the same order. `classify` decides
whether an error means damage, a failure of the storage or a missing permission.
"""

import builtins
import enum
import errno
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import jax

from vit_jax.errors import StorageError, UserError
from vit_jax.files import paths
from vit_jax.files.paths import PAUSES_S
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
# TensorStore raises ValueError for all errors; the text begins with the name of
# a status of Abseil.
_STATUS = re.compile(r'([A-Z]+(?:_[A-Z]+)*): ')
_DAMAGED = re.compile(
  r'(DATA_LOSS|OUT_OF_RANGE|FAILED_PRECONDITION|NOT_FOUND|INVALID_ARGUMENT'
  r'|UNIMPLEMENTED): '
)
_DENIED = re.compile(r'(PERMISSION_DENIED|UNAUTHENTICATED): ')
_DAMAGED_ERRNO = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)


class CorruptError(Exception):
  """The content of a step directory differs from what was written."""


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
  # Orbax wraps errors. A CorruptError may itself have a cause.
  root: BaseException = error
  while root.__cause__ is not None and not isinstance(root, CorruptError):
    root = root.__cause__
  if isinstance(root, CorruptError):
    return Outcome.DAMAGED
  if isinstance(root, FileNotFoundError | NotADirectoryError):
    return Outcome.DAMAGED  # Orbax raises some of these without an errno
  number, text = paths.error_number(root), str(root)
  has_errno = isinstance(root, OSError) or number is not None
  if has_errno or _STATUS.match(text):
    if number in (errno.EACCES, errno.EPERM) or _DENIED.match(text):
      return Outcome.DENIED
    is_damaged = number in _DAMAGED_ERRNO if has_errno else _DAMAGED.match(text)
    return Outcome.DAMAGED if is_damaged else Outcome.UNREADABLE
  # Parsers of damaged files raise built-in exceptions. Clients of object stores
  # define their own exceptions, which mean an outage.
  is_builtin = getattr(builtins, type(root).__name__, None) is type(root)
  is_of_parser = is_builtin or isinstance(root, ValueError)
  if is_of_parser and not isinstance(root, MemoryError):
    return Outcome.DAMAGED
  return Outcome.UNREADABLE


class FailedError(Exception):
  """A call failed on at least one process.

  Attributes:
    outcome: the worst outcome of all processes.
    local_error: error of this process; None if it succeeded.
  """

  def __init__(
    self, text: str, outcome: Outcome, local_error: Exception | None
  ):
    super().__init__(text.rstrip('.'))
    self.outcome, self.local_error = outcome, local_error


def on_main(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function on the main process only.

  Args:
    function: function to call; its result must be JSON-able.
    *arguments: arguments of the function.

  Returns:
    The result of the function, on all processes.

  Raises:
    FailedError: on all processes, if the function raises.
  """
  is_main = jax.process_index() == 0
  value = on_all(lambda: function(*arguments) if is_main else None)
  return consensus.from_main(lambda: value)


def on_all(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function on every process; either all succeed or all raise.

  Args:
    function: function to call.
    *arguments: arguments of the function.

  Returns:
    The result of the function on this process.

  Raises:
    FailedError: on all processes, if the function raises on any of them.
  """
  value, local_error = None, None
  try:
    value = function(*arguments)
  except jax.errors.JaxRuntimeError:
    raise  # an error of the devices or a lost peer, not of the files
  except Exception as error:  # noqa: BLE001 (damaged files raise any type)
    local_error = error
  local = Outcome.INTACT if local_error is None else classify(local_error)
  outcomes = consensus.gather_integer(local)
  worst = Outcome(max(outcomes))
  if worst is Outcome.INTACT:
    return value
  if local_error is None:
    failed = [i for i, outcome in enumerate(outcomes) if outcome == worst]
    indices = ', '.join(map(str, failed))
    text = f'process {indices} failed; the cause is in its log'
  elif isinstance(local_error, CorruptError | UserError):
    text = str(local_error)
  else:
    text = root_cause(local_error)
  raise FailedError(text, worst, local_error)


def read_with_retries(attempt: Callable[[], Any], subject: str) -> Any:
  """Calls a function that reads files, again if a failure may be temporary.

  Args:
    attempt: function to call; if it fails, it must raise FailedError on all
      processes.
    subject: name of the files, for messages.

  Returns:
    The result of the function.

  Raises:
    CorruptError: the files were damaged in two attempts. (Some file systems
      return damaged data once, while a cache is stale.)
    UserError: the files do not belong to this run, or there is no permission to
      read them.
    StorageError: the files cannot be read, even after retries.
  """
  damaged = 0
  for pause_s in (*PAUSES_S, None):
    try:
      return attempt()
    except FailedError as error:
      failure = error
    if failure.outcome is Outcome.REFUSED:
      if isinstance(failure.local_error, UserError):
        raise failure.local_error
      raise UserError(f'{subject} cannot be used: {failure}.')
    damaged += failure.outcome is Outcome.DAMAGED
    if damaged == 2:
      raise CorruptError(str(failure)) from failure
    if pause_s is not None:
      log.warning('%s: %s. Trying again in %g s.', subject, failure, pause_s)
      time.sleep(pause_s)
  kind = UserError if failure.outcome is Outcome.DENIED else StorageError
  raise kind(
    f'{subject} cannot be read: {failure}. Nothing was renamed. Start again '
    'when the storage responds and this user has the permission to read it, or '
    'rename the step to <step>.bad.'
  )


def innermost(error: BaseException) -> BaseException:
  """Returns the innermost cause of an exception."""
  while error.__cause__ is not None:
    error = error.__cause__
  return error


def root_cause(error: BaseException) -> str:
  """Returns the innermost cause of an exception, in one line."""
  return paths.reason(innermost(error))
