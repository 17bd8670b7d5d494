"""Flags and functions that the commands sweep and study share."""

import logging
import pathlib
import re
import sys
from collections.abc import Callable
from typing import TypeVar

from absl import flags

from vit_jax.config import overrides
from vit_jax.errors import UserError
from vit_jax.files import paths

log = logging.getLogger('vit_jax')
T = TypeVar('T')


def define_flags(kind: str, folder: str) -> None:
  """Defines the flags of `sweep` and `study`.

  Args:
    kind: 'sweep' or 'study'.
    folder: folder of the configs, 'sweeps' or 'studies'.
  """
  flags.DEFINE_string('config', None, f'Path of the {kind}, with its argument.')
  flags.DEFINE_string(
    'workdir', None, f'Directory of all runs; default runs/{folder}/NAME.'
  )
  flags.DEFINE_bool(
    'print_jobs', False, 'Print the commands instead of running them.'
  )
  flags.DEFINE_multi_string(
    'overrides', overrides.extract(sys.argv), 'Set by --config.KEY=….'
  )


def load(
  arguments: list[str], folder: str, function: Callable[[str], T]
) -> tuple[T, str]:
  """Loads the sweep or study that the flags specify.

  Args:
    arguments: arguments that are not flags; there must be none.
    folder: folder of the configs, 'sweeps' or 'studies'.
    function: function that loads the content of a config.

  Returns:
    The content of the config, and the workdir.

  Raises:
    UserError: there are arguments, --config is missing, or the workdir is
      remote.
  """
  values = flags.FLAGS
  if arguments or not values.config:
    raise UserError(
      f'got {arguments or "no config"}; give '
      f'--config=configs/{folder}/NAME.py, and no arguments that are not flags.'
    )
  content = function(values.config)
  workdir = values.workdir or default_workdir(folder, values.config)
  if paths.is_remote(workdir):
    raise UserError(f'--workdir is {workdir!r}; give a local directory.')
  return content, workdir


def default_workdir(folder: str, path: str) -> str:
  """Returns runs/FOLDER/NAME, with the argument of the config if it has one."""
  file, _, argument = path.partition(':')
  name = pathlib.Path(file).stem
  if argument:
    name += '-' + re.sub(r'[^\w.=-]', '-', argument.replace('/', ''))
  return f'runs/{folder}/{name}'


def print_table(workdir: str) -> None:
  """Prints the table of results, unless --print_jobs is set."""
  if not flags.FLAGS.print_jobs:
    print((paths.locate(workdir) / 'results.md').read_text())
  log.info('tables in %s', workdir)
