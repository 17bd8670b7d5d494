"""A run's directory: config.json, run.json, and which run it belongs to."""

import json
import logging
import pathlib
from typing import Any

from etils import epath

from vit_jax.config import completion as config_lib
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.files import atomic, jsonl, paths
from vit_jax.run import identity

log = logging.getLogger('vit_jax')


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
    UserError: identity keys differ from config.json's, or it cannot be read.
  """
  path = paths.locate(workdir)
  before = last_config(path)
  if before and not {'model', 'batch_size', 'total'} & before.keys():
    raise UserError(
      f'the workdir {workdir} holds a config.json that is no run of this '
      'program: give another --workdir.'
    )
  if before is not None and not allow_changes:
    changes = identity.config_changes(before, config)
    if changes:
      raise identity.refusal(workdir, changes)
  return path


def last_config(path: epath.Path) -> dict[str, Any] | None:
  """The config of the last start; None where there is none, or a damaged one.

  Raises:
    UserError: it is there and cannot be read.
  """
  file = path / 'config.json'
  try:
    content = file.read_bytes() if file.exists() else None
  except Exception as error:  # noqa: BLE001 (each store has its own errors)
    raise UserError(
      f'the workdir {path} cannot be used: {paths.reason(error)}. Check '
      'its name and your permissions, or give another --workdir.'
    ) from error
  if content is None:
    return None
  config = jsonl.parse(content)
  if config is None:
    log.warning(
      '%s is damaged (no JSON object) and is set aside; the config that the '
      'checkpoints hold is compared in its place',
      file,
    )
  return config


def record(path: epath.Path, config: Config, run: dict[str, Any]) -> None:
  """Writes config.json and run.json, once it is clear that a run can start.

  Raises:
    UserError: the directory is not writable.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
    file = path / 'config.json'
    if file.exists() and jsonl.parse(file.read_bytes()) is None:
      file.rename(path / 'config.json.bad')
    atomic.write(file, config_lib.to_json(config))
    atomic.write(path / 'run.json', json.dumps(run, indent=2) + '\n')
  except OSError as error:
    raise UserError(
      f'the workdir {path} cannot be written: {error}. Give another --workdir.'
    ) from error
