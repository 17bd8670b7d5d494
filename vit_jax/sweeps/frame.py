"""The frame of a command that carries out many runs: its flags, and its end."""

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
  flags.DEFINE_string('config', None, f'File of a {kind}, with its argument.')
  flags.DEFINE_string(
    'workdir', None, f'Of all its runs; default runs/{folder}/NAME.'
  )
  flags.DEFINE_bool('print_jobs', False, 'Print commands and run nothing.')
  flags.DEFINE_multi_string(
    'overrides', overrides.take(sys.argv), 'Set by --config.KEY=….'
  )


def opened(
  arguments: list[str], folder: str, load: Callable[[str], T]
) -> tuple[T, str]:
  """Loads the config with `load`; returns its content and the runs' workdir.

  Raises:
    UserError: there are arguments, no config, or the workdir is not local.
  """
  values = flags.FLAGS
  if arguments or not values.config:
    raise UserError(
      f'--config=configs/{folder}/NAME.py is needed, and flags only; got '
      f'{arguments or "no config"}.'
    )
  found = load(values.config)
  workdir = values.workdir or default_workdir(folder, values.config)
  if paths.is_remote(workdir):
    raise UserError(f'--workdir={workdir} must be local.')
  return found, workdir


def default_workdir(folder: str, path: str) -> str:
  """runs/FOLDER/NAME, with the argument of the file where the path has one."""
  file, _, argument = path.partition(':')
  name = pathlib.Path(file).stem
  if argument:
    name += '-' + re.sub(r'[^\w.=-]', '-', argument.replace('/', ''))
  return f'runs/{folder}/{name}'


def tell(workdir: str) -> None:
  """Prints the table, unless commands were to be printed."""
  if not flags.FLAGS.print_jobs:
    print((paths.locate(workdir) / 'results.md').read_text())
  log.info('tables in %s', workdir)
