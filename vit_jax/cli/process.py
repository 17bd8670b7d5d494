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
  parent,
  peers,
  runtime,
)

_LATE_S = 60  # time limit for the other processes to connect


def run(body: Callable[[list[str]], None], define: Callable[[], None]) -> None:
  """Runs a command and exits with its code.

  The codes are 0 (finished), 1 (a crash, with its traceback, or a storage
  error, with a message that states what is saved), 2 (an error of the user,
  with one message and no traceback), 42 (preempted, state saved), 43
  (diverged), 44 (stuck, see watchdog.py) and 45 (another process was lost). If
  one of several processes ends, all end.

  Args:
    body: function of the arguments that are not flags.
    define: function that defines the flags; it may change `sys.argv`.
  """
  # TensorFlow only writes events and prepares data sets: hide its log.
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
    runtime.start_logging()  # after absl has set up its own
    _guarded(lambda: body(argv[1:]))

  def start() -> None:
    define()
    if help.asked(sys.argv):
      header = sys.modules[body.__module__].__doc__ or ''
      print(help.text(header, flags.FLAGS))
      return
    app.run(main, argv=sys.argv, flags_parser=parse)

  try:
    _guarded(start)
  finally:
    _part()


def _part() -> None:
  """Waits for the other processes; from then on, signals are ignored."""
  peers.shut_down()
  if interruption.HANDLER.installed:
    interruption.HANDLER.ignore()


def _guarded(function: Callable[[], None]) -> None:
  try:
    function()
  except (UserError, PreemptedError, StorageError, DivergedError) as error:
    peers.announce(error)
    _end(error)
  except Exception as error:
    if known := backends.user_error(error) or paths.of_a_store(error):
      peers.announce(known)
      _end(known)
    peers.announce(error)
    if peers.client() is None:
      raise
    traceback.print_exc()
    peers.exit_now(EXIT_CRASH)


def _end(error: Exception) -> None:
  """Ends the process with the message and the code of an expected error."""
  ended = peers.exit_status(error)
  assert ended is not None
  code, message = ended
  sys.stdout.flush()
  print(message, file=sys.stderr, flush=True)
  if code != EXIT_USER_ERROR:
    sys.exit(code)
  if peers.client() is None and _join_late():
    peers.announce(error)
  if peers.client() is not None:
    peers.exit_now(code)
  sys.exit(code)


def _join_late() -> bool:
  """Joins the other processes to tell them the error.

  They wait for this process, although it is about to end.

  Returns:
    Whether there are other processes.
  """
  if 'coordinator_address' not in flags.FLAGS:
    return False
  own = flags.FlagValues()
  define_distributed_flags(own)
  try:
    own(sys.argv, known_only=True)
    return runtime.join(
      own.coordinator_address, own.num_processes, own.process_id, _LATE_S
    )
  except Exception:  # noqa: BLE001 (the message has been printed anyway)
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
  """Prepares this process for training; joins the other processes."""
  runtime.keep_host_memory()
  values = flags.FLAGS
  runtime.start_distributed(
    values.coordinator_address, values.num_processes, values.process_id
  )
