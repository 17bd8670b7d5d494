"""Flags and arguments that train and finetune share."""

import logging
import sys
from typing import Any

from absl import flags

from vit_jax.cli import process
from vit_jax.config import overrides
from vit_jax.config.completion import Config, to_json
from vit_jax.errors import UserError
from vit_jax.processes import runtime
from vit_jax.run import workdir

log = logging.getLogger('vit_jax')


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
  process.define_distributed_flags()
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
  profile = profile_span(values.profile)
  runtime.cache_compilations()
  path = workdir.check(
    chosen_workdir(), config, allow_changes=values.allow_config_change
  )
  if runtime.is_main():
    log.info('workdir %s', path)
  else:
    log.setLevel(logging.WARNING)
  return {
    'workdir': path,
    'profile': profile,
    'allow_changes': values.allow_config_change,
  }


def chosen_workdir() -> str:
  """Returns --workdir, or the default workdir of the config."""
  values = flags.FLAGS
  return values.workdir or workdir.default(values.config_path)


def profile_span(text: str | None) -> tuple[int, int] | None:
  """Returns (start, stop) for --profile=START:STOP.

  Raises:
    UserError: the value does not consist of two ascending numbers.
  """
  if text is None:
    return None
  first, _, last = text.partition(':')
  if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
    raise UserError(
      f'--profile is {text!r}; give START:STOP, the first step to trace and '
      'the first step that is not traced, such as 10:15.'
    )
  return int(first), int(last)


def refuse_arguments(arguments: list[str]) -> None:
  """Raises UserError if an argument is not a flag."""
  if arguments:
    raise UserError(
      f'{arguments[0]!r} is not a flag: all arguments start with --.'
    )
