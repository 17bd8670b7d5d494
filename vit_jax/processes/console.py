"""The log of a process, on stderr."""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from absl import logging as absl_logging

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
