"""A run's directory: its config, what it ran on, and whose it is."""

import contextlib
import json
import pathlib
from typing import Any

from etils import epath

from vit_jax import config as config_lib
from vit_jax.config import Config
from vit_jax.errors import UserError

_LENGTH = (
  ' The learning rate follows from the total: at the next step it is that of '
  'the new length, and the run is not one that had this length from the start.'
)


def default(config_path: str) -> str:
  """runs/<config name, with its arguments>; a config.json's own workdir."""
  folder, _, file = config_path.rpartition('/')
  if file == 'config.json':
    return folder or '.'
  path, _, arg = config_path.partition(':')
  name = pathlib.Path(path).stem
  if arg:
    name += '-' + arg.replace('/', '').replace('=', '_').replace(',', '-')
  return f'runs/{name}'


def check(workdir: str, config: Config, *, allow_changes: bool) -> epath.Path:
  """The directory as a path, if it is new or belongs to the same run.

  Args:
    workdir: local or gs:// path.
    config: resolved.
    allow_changes: go on although identity keys differ.

  Raises:
    UserError: identity keys differ from config.json's, or it is unreadable.
  """
  path = epath.Path(workdir).expanduser().absolute()
  file = path / 'config.json'
  try:
    if file.exists() and not allow_changes:
      _check_identity(workdir, json.loads(file.read_text()), config)
  except (OSError, json.JSONDecodeError) as error:
    raise UserError(
      f'the workdir {workdir} cannot be used: {error}. Give another --workdir.'
    ) from error
  return path


def record(path: epath.Path, config: Config, run: dict[str, Any]) -> None:
  """Writes config.json and run.json, once it is clear that a run can start.

  Raises:
    UserError: the directory is not writable.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
    (path / 'config.json').write_text(config_lib.to_json(config))
    (path / 'run.json').write_text(json.dumps(run, indent=2) + '\n')
  except OSError as error:
    raise UserError(
      f'the workdir {path} cannot be written: {error}. Give another --workdir.'
    ) from error


def _check_identity(
  workdir: str, before: dict[str, Any], config: Config
) -> None:
  with contextlib.suppress(UserError):  # keys that are newer than the workdir
    before = config_lib.from_dict(before).to_dict()
  old, new = config_lib.identity(before), config_lib.identity(config)
  differing = [
    f'{key}: {old.get(key)!r} there, {new.get(key)!r} now'
    for key in sorted({*old, *new})
    if old.get(key) != new.get(key)
  ]
  if differing:
    raise UserError(
      f'{workdir} belongs to a run with another config:\n  '
      + '\n  '.join(differing)
      + '\nTake another --workdir, or resume with the change by '
      '--allow_config_change.'
      + (_LENGTH if old.get('total') != new.get('total') else '')
    )
