"""Reads and writes config.json and run.json of a workdir."""

import json
import logging
import pathlib
from typing import Any

from etils import epath

from vit_jax.config import schema
from vit_jax.config.schema import Config
from vit_jax.files import jsonl, paths

log = logging.getLogger('vit_jax')


def default(config_path: str) -> str:
  """Returns the default workdir of a config.

  Args:
    config_path: path of a config file, optionally with arguments after a colon.

  Returns:
    'runs/<name of the config, with its arguments>'; for a run's config.json,
    the directory of that run.
  """
  folder, _, file = config_path.rpartition('/')
  if file == 'config.json':
    return folder or '.'
  path, _, arg = config_path.partition(':')
  name = pathlib.Path(path).stem
  if arg:
    name += '-' + arg.replace('/', '').replace('=', '_').replace(',', '-')
  return f'runs/{name}'


def last_config(path: epath.Path) -> dict[str, Any] | None:
  """Reads the config of the last start.

  Args:
    path: workdir.

  Returns:
    The config; None if the file is missing or damaged.

  Raises:
    UserError: the file exists, but there is no permission to read it.
    StorageError: the file exists, but cannot be read.
  """
  file = path / 'config.json'
  config = jsonl.parse(jsonl.content(file))
  if config is None and file.exists():
    log.warning(
      '%s is damaged (it is not a JSON object); the config stored in the '
      'checkpoints is compared instead',
      file,
    )
  return config


def record(path: epath.Path, config: Config, run: dict[str, Any]) -> None:
  """Writes config.json and run.json of a run that has passed all checks.

  Args:
    path: workdir.
    config: completed config.
    run: content of run.json.

  Raises:
    UserError: there is no permission to write the directory.
    StorageError: the storage is full or keeps failing.
  """
  file = path / 'config.json'

  def write() -> None:
    path.mkdir(parents=True, exist_ok=True)
    if file.exists() and jsonl.parse(file.read_bytes()) is None:
      file.rename(path / 'config.json.bad')
    paths.write(file, schema.to_json(config))
    paths.write(path / 'run.json', json.dumps(run, indent=2) + '\n')

  paths.with_retries(write, file, 'written')
