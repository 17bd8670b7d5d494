"""The log of a process, on stderr, and the end of its output."""

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from absl import logging as absl_logging

from vit_jax.errors import StorageError

log = logging.getLogger('vit_jax')


def start_logging() -> None:
  """Sends this package's log to stderr, and silences noisy libraries."""
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S'))
  log.handlers[:] = [handler]
  log.propagate = False
  log.setLevel(logging.INFO)
  # Orbax logs through absl, gcsfs through its own logger. Their errors are also
  # raised as exceptions, and reported once. If a disk is full, thousands of log
  # lines would hide that report.
  absl_logging.set_verbosity(absl_logging.FATAL)
  for name in ('gcsfs', 'asyncio', 'fsspec'):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _report_unraisable(report: Callable[[Any], None], caught: Any) -> None:
  """Reports an error of a callback, unless it results from a failed save.

  After a failed save, each of TensorStore's many futures uses an event loop
  that Orbax has closed. The failure itself was already raised and logged.

  Args:
    report: original hook, which prints the traceback.
    caught: argument of `sys.unraisablehook`.
  """
  error = caught.exc_value
  if isinstance(error, RuntimeError) and str(error) == 'Event loop is closed':
    return
  report(caught)


def print_error(message: str) -> None:
  """Prints the reason for which this process ends.

  An output that cannot be written (a full disk, a closed pipe) does not change
  how the process ends.

  Args:
    message: reason.
  """
  try:
    flush_output()
  except OSError:
    _discard(sys.stdout)
  try:
    print(message, file=sys.stderr, flush=True)
  except OSError:
    _discard(sys.stderr)


def flush_output() -> None:
  """Writes what was printed; it raises OSError if that is not possible."""
  if sys.stdout is not None:  # None if a shell closed it by `>&-`
    sys.stdout.flush()


def output_error(error: Exception) -> StorageError | None:
  """Returns the error for an output that cannot be written, or None.

  Args:
    error: any error; one of a file does not name its path while it is written.
  """
  if not isinstance(error, OSError) or sys.stdout is None:
    return None
  try:
    print(flush=True)  # what has failed is no longer in the buffer
  except OSError:
    _discard(sys.stdout)
    return StorageError(f'the output cannot be written: {error.strerror}.')
  return None


def _discard(file: Any) -> None:
  """Discards what a buffer holds, which Python could not write at exit."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
