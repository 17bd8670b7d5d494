"""Runs a command: start, error messages, exit codes, and flags of training."""

import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from vit_jax.cli import help
from vit_jax.config import identity, overrides
from vit_jax.config.completion import to_json
from vit_jax.config.schema import Config
from vit_jax.errors import EXIT_CRASH, EXIT_USER_ERROR, UserError
from vit_jax.files import paths
from vit_jax.processes import (
  consensus,
  console,
  interruption,
  machine,
  peers,
  runtime,
)
from vit_jax.run import resume

log = logging.getLogger('vit_jax')
_CONNECT_S = 60  # time limit for joining the other processes to report an error


def define_flags() -> None:
  """Defines the flags of train and finetune."""
  flags.DEFINE_string(
    'workdir', None, 'Directory of the run; default runs/<config name>.'
  )
  flags.DEFINE_bool(
    'allow_config_change',
    False,
    'Resume a workdir even if its config has other values.',
  )
  flags.DEFINE_bool(
    'print_config', False, 'Print the resolved config as JSON, and exit.'
  )
  flags.DEFINE_string('profile', None, 'Steps to trace, START:STOP.')
  define_distributed_flags()
  overrides.define_flag(sys.argv)


def prints_config(config: Config) -> bool:
  """Prints the config if --print_config is given.

  The output can be saved as FILE.json and used again by --config=FILE.json.

  Args:
    config: completed config.

  Returns:
    Whether --print_config is given.
  """
  if flags.FLAGS.print_config:
    print(to_json(config), end='')
  return flags.FLAGS.print_config


def run_options(config: Config) -> dict[str, Any]:
  """Returns the arguments of `loop.run` that flags specify.

  Raises:
    UserError: the workdir belongs to another run, or --profile is invalid.
  """
  values = flags.FLAGS
  profile = None
  if values.profile is not None:
    match = re.fullmatch(r'(\d+):(\d+)', values.profile)
    profile = match and (int(match[1]), int(match[2]))
    if not profile or profile[0] >= profile[1]:
      raise UserError(
        f'--profile is {values.profile!r}; give START:STOP, the first step to '
        'trace and the first step that is not traced, such as 10:15.'
      )
  runtime.cache_compilations()
  path = resume.check_workdir(
    chosen_workdir(), config, allow_changes=values.allow_config_change
  )
  if runtime.is_main():
    log.info('workdir %s', path)
  else:
    log.setLevel(logging.WARNING)
  return {
    'config': identity.absolute(config),
    'workdir': path,
    'profile': profile,
    'allow_changes': values.allow_config_change,
  }


def chosen_workdir() -> str:
  """Returns --workdir, or the default workdir of the config."""
  values = flags.FLAGS
  return values.workdir or resume.default_workdir(values.config_path)


def usage(text: str) -> UserError:
  """Returns the error for arguments that are missing or not allowed.

  Args:
    text: name of the command and its arguments.
  """
  given = shlex.join(sys.argv[1:]) or 'no arguments'
  return UserError(f'usage: python -m vit_jax.{text}; got {given}.')


def refuse_arguments(arguments: list[str]) -> None:
  """Raises UserError if an argument is not a flag."""
  if arguments:
    raise UserError(
      f'{arguments[0]!r} is not a flag: all arguments start with --.'
    )


def refuse_empty(values: flags.FlagValues) -> None:
  """Raises UserError if a flag is empty, as with an empty variable of a shell.

  Otherwise such a flag would have the effect of one that is not given.

  Args:
    values: parsed flags.
  """
  for name in values:
    if values[name].present and values[name].value == '':
      raise UserError(f'--{name} is empty: give a value, or omit the flag.')


def run(body: Callable[[list[str]], None], define: Callable[[], None]) -> None:
  """Runs a command and exits with its code.

  The codes are 0 (finished), 1 (a crash, with its traceback, or an error of the
  storage or of a download, with one message), 2 (an error of the user, with one
  message and no traceback), 42 (preempted, state saved), 43 (diverged), 44
  (stuck, see watchdog.py) and 45 (another process was lost). If one of several
  processes ends with an error, all of them end.

  Args:
    body: main function of the command; its argument is the list of arguments
      that are not flags.
    define: function that defines the flags; it may change `sys.argv`.
  """
  # TensorFlow is only used to prepare data sets and to export SavedModels, so
  # its log is hidden.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
  # A name that the output cannot encode is escaped.
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors='backslashreplace')
  machine.hide_unused_libtpu()
  machine.use_gpu_memory()
  interruption.end_with_parent()

  def parse(argv: list[str]) -> list[str]:
    try:
      arguments = flags.FLAGS(argv)
    except flags.Error as error:
      raise UserError(overrides.unknown_flag_message(error)) from error
    refuse_empty(flags.FLAGS)
    return arguments

  def main(argv: list[str]) -> None:
    console.start_logging()  # must come after absl has set up its own logging
    runtime.reset_settings()
    # Here, because absl logs an exception that leaves `main` with a traceback.
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
    _report_errors(start)  # those of flags and of their parsing
    code = 0
  except SystemExit as end:  # absl raises it in any case
    code = end.code if isinstance(end.code, int) else int(bool(end.code))
    raise
  finally:
    # Signals are handled as long as this process waits for the others; after
    # that, threads that libraries left behind may delay the exit.
    consensus.shut_down()
    if interruption.HANDLER.installed:
      interruption.HANDLER.ignore()
    if code:
      interruption.bound_exit(code)


def _report_errors(function: Callable[[], None]) -> None:
  """Calls a function; its errors end this process and all others."""
  try:
    function()
    console.flush_output()
  except Exception as error:
    # The error with an exit code of its own, or None for a crash.
    expected = error
    if peers.exit_status(error) is None:
      expected = (
        machine.user_error(error)
        or paths.name_error(error)
        or paths.object_store_error(error)
        or console.output_error(error)
      )
    peers.announce(expected or error)
    if expected:
      _exit(expected)
    if peers.client() is None:
      raise
    traceback.print_exc()
    peers.exit_now(EXIT_CRASH)


def _exit(error: Exception) -> None:
  """Ends the process with the message and the code of an expected error."""
  status = peers.exit_status(error)
  assert status is not None
  code, message = status
  console.print_error(message)
  if code == EXIT_USER_ERROR:
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
    return runtime.start_distributed(
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
  machine.check_limits()
  machine.keep_host_memory()
  values = flags.FLAGS
  runtime.start_distributed(
    values.coordinator_address, values.num_processes, values.process_id
  )


def plan(arguments: Sequence[str]) -> dict[str, Any]:
  """Returns the output of `python -m vit_jax.plan --json`.

  Commands do not import each other, so it is a process.

  Args:
    arguments: flags of the command: --config, its keys, and --topology.

  Raises:
    UserError: the config cannot be planned; `plan` has printed the reason.
  """
  command = [sys.executable, '-m', 'vit_jax.plan', '--json', *arguments]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if done.returncode:
    raise UserError(f'plan failed (see above): exit code {done.returncode}.')
  return json.loads(done.stdout.splitlines()[-1])
