"""Runs a command: flags, error messages and exit codes."""

import os
import sys
import traceback
from collections.abc import Callable

from absl import app, flags

from vit_jax.cli import help
from vit_jax.config import overrides
from vit_jax.errors import (
  EXIT_CRASH,
  EXIT_USER_ERROR,
  DivergedError,
  PreemptedError,
  StorageError,
  UserError,
)
from vit_jax.files import paths
from vit_jax.processes import (
  backends,
  interruption,
  limits,
  parent,
  peers,
  runtime,
)

_CONNECT_S = 60  # time limit for joining the other processes to report an error


def run(body: Callable[[list[str]], None], define: Callable[[], None]) -> None:
  """Runs a command and exits with its code.

  The codes are 0 (finished), 1 (a crash, with its traceback, or a storage
  error, with a message that states what is saved), 2 (an error of the user,
  with one message and no traceback), 42 (preempted, state saved), 43
  (diverged), 44 (stuck, see watchdog.py) and 45 (another process was lost). If
  one of several processes ends with an error, all of them end.

  Args:
    body: main function of the command; its argument is the list of arguments
      that are not flags.
    define: function that defines the flags; it may change `sys.argv`.
  """
  # TensorFlow is only used to prepare data sets and to export SavedModels, so
  # its log is hidden.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
  backends.hide_unused_libtpu()
  backends.use_gpu_memory()
  parent.end_with_parent()

  def parse(argv: list[str]) -> list[str]:
    try:
      return flags.FLAGS(argv)
    except flags.Error as error:
      raise UserError(overrides.unknown_flag_message(error)) from error

  def main(argv: list[str]) -> None:
    runtime.start_logging()  # must come after absl has set up its own logging
    _report_errors(lambda: body(argv[1:]))

  def start() -> None:
    define()
    if help.is_requested(sys.argv):
      header = sys.modules[body.__module__].__doc__ or ''
      print(help.text(header, flags.FLAGS))
      return
    app.run(main, argv=sys.argv, flags_parser=parse)

  code = EXIT_CRASH
  try:
    _report_errors(start)
    code = 0
  except SystemExit as end:  # absl raises it in any case
    code = end.code if isinstance(end.code, int) else int(bool(end.code))
    raise
  finally:
    _shut_down()
    if code:
      limits.bound_exit(code)


def _shut_down() -> None:
  """Waits for the other processes, and ignores signals afterwards."""
  peers.shut_down()
  if interruption.HANDLER.installed:
    interruption.HANDLER.ignore()


def _report_errors(function: Callable[[], None]) -> None:
  """Calls a function; its errors end this process and all others."""
  try:
    function()
  except (UserError, PreemptedError, StorageError, DivergedError) as error:
    peers.announce(error)
    _exit(error)
  except Exception as error:
    expected = (
      backends.user_error(error)
      or paths.name_error(error)
      or paths.object_store_error(error)
    )
    if expected:
      peers.announce(expected)
      _exit(expected)
    peers.announce(error)
    if peers.client() is None:
      raise
    traceback.print_exc()
    peers.exit_now(EXIT_CRASH)


def _exit(error: Exception) -> None:
  """Ends the process with the message and the code of an expected error."""
  status = peers.exit_status(error)
  assert status is not None
  code, message = status
  sys.stdout.flush()
  print(message, file=sys.stderr, flush=True)
  if code != EXIT_USER_ERROR:
    sys.exit(code)
  if peers.client() is None and _join_to_report():
    peers.announce(error)
  if peers.client() is not None:
    peers.exit_now(code)
  sys.exit(code)


def _join_to_report() -> bool:
  """Connects to the other processes, which otherwise would wait for this one.

  The error may have occurred before the flags were parsed, so they are parsed
  here.

  Returns:
    Whether there are other processes.
  """
  if 'coordinator_address' not in flags.FLAGS:
    return False
  values = flags.FlagValues()
  define_distributed_flags(values)
  try:
    values(sys.argv, known_only=True)
    return runtime.join(
      values.coordinator_address,
      values.num_processes,
      values.process_id,
      _CONNECT_S,
    )
  except Exception:  # noqa: BLE001 (the message has already been printed)
    return False


def define_distributed_flags(into: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the flags for runs whose processes JAX cannot find."""
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'HOST:PORT of process 0, the same for all processes.',
    flag_values=into,
  )
  flags.DEFINE_integer(
    'num_processes', None, 'Number of processes.', flag_values=into
  )
  flags.DEFINE_integer(
    'process_id', None, 'Index of this process, from 0.', flag_values=into
  )


def start_process() -> None:
  """Prepares this process for training, and connects the other processes."""
  limits.check()
  runtime.keep_host_memory()
  values = flags.FLAGS
  runtime.start_distributed(
    values.coordinator_address, values.num_processes, values.process_id
  )
