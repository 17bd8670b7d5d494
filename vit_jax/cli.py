"""What every command shares: flags, messages, exit codes."""

import os
import sys
from collections.abc import Callable

import jax
from absl import app, flags

from vit_jax import overrides, runtime
from vit_jax.errors import (
  DivergedError,
  PreemptedError,
  StorageError,
  UserError,
)
from vit_jax.preemption import EXIT_PREEMPTED

EXIT_STORAGE = 1
EXIT_USER_ERROR = 2
EXIT_DIVERGED = 43
EXIT_PEER_LOST = 45


def run(body: Callable[[list[str]], None], define: Callable[[], None]) -> None:
  """Runs a command and exits with its code.

  0: finished; 2: a user's error, one message and no traceback; 42: preempted,
  state saved; 43: diverged; 44: stuck (see watchdog.py); 45: a peer was lost
  (the runtime may abort with 134 before it says so); 1: a crash, with its
  traceback, or storage that failed, with a message that says what is saved.

  Args:
    body: called with the arguments that are no flags.
    define: defines the command's flags; it may look at and shorten `sys.argv`.
  """

  # TensorFlow only writes events and prepares data sets here: no greetings.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')

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
    app.run(main, argv=sys.argv, flags_parser=parse)

  _guarded(start)


def _guarded(function: Callable[[], None]) -> None:
  try:
    function()
  except UserError as error:
    _end(f'error: {error}', EXIT_USER_ERROR)
  except PreemptedError as error:
    _end(f'preempted: {error}', EXIT_PREEMPTED)
  except StorageError as error:
    _end(f'storage failed: {error}', EXIT_STORAGE)
  except DivergedError as error:
    _end(f'diverged: {error}', EXIT_DIVERGED)
  except jax.errors.JaxRuntimeError as error:
    if not runtime.is_lost_peer(error):
      raise
    print(
      f'peer lost: {str(error).splitlines()[0][:300]}. What was saved is '
      'whole; start all processes again, on as many hosts as there are.',
      file=sys.stderr,
      flush=True,
    )
    os._exit(EXIT_PEER_LOST)  # an orderly end would wait for the peer


def _end(message: str, code: int) -> None:
  sys.stdout.flush()
  print(message, file=sys.stderr, flush=True)
  sys.exit(code)


def define_distributed_flags() -> None:
  """Flags that name the processes of a run where JAX cannot find them."""
  flags.DEFINE_string(
    'coordinator_address', None, 'host:port of process 0, the same for all.'
  )
  flags.DEFINE_integer('num_processes', None, 'Processes in the run.')
  flags.DEFINE_integer('process_id', None, 'Number of this process, from 0.')


def start_process() -> None:
  """Readies this process for steps; joins the others, by flags or JAX."""
  runtime.keep_host_memory()
  values = flags.FLAGS
  runtime.start_distributed(
    values.coordinator_address, values.num_processes, values.process_id
  )
