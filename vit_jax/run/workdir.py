"""Checks that a workdir belongs to a run; writes config.json and run.json."""

import json
import logging
import os
import pathlib
from typing import Any

from etils import epath

from vit_jax.config import completion as config_lib
from vit_jax.config import identity
from vit_jax.config.completion import Config
from vit_jax.errors import StorageError, UserError
from vit_jax.files import atomic, jsonl, outages, paths
from vit_jax.run import comparison

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


def check(workdir: str, config: Config, *, allow_changes: bool) -> epath.Path:
  """Checks that a workdir is new or belongs to the same run.

  Args:
    workdir: local path, or gs:// address.
    config: completed config.
    allow_changes: whether to resume although the config differs.

  Returns:
    The workdir as a path.

  Raises:
    UserError: the path is not UTF-8, config.json belongs to another run, or
      there is no permission to read it.
    StorageError: config.json cannot be read.
  """
  path = paths.locate(workdir)
  try:
    os.fspath(path).encode()
  except UnicodeEncodeError as error:  # checkpoints could not be saved
    raise UserError(
      f'the workdir {ascii(os.fspath(path))} is not valid UTF-8: give another '
      '--workdir, or rename its directory.'
    ) from error
  last = last_config(path)
  if last and not {'model', 'batch_size', 'total'} & last.keys():
    raise UserError(
      f'the workdir {workdir} contains a config.json that does not belong to a '
      'run of this program: give another --workdir.'
    )
  if last is not None and not allow_changes:
    changes = identity.config_changes(last, config)
    if changes:
      raise comparison.refusal(workdir, changes)
  return path


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
  try:
    content = outages.with_retries(
      lambda: file.read_bytes() if file.exists() else None, file, 'read'
    )
  except (UserError, StorageError) as error:
    raise type(error)(f'the workdir {path} cannot be used: {error}') from error
  if content is None:
    return None
  config = jsonl.parse(content)
  if config is None:
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
    atomic.write(file, config_lib.to_json(config))
    atomic.write(path / 'run.json', json.dumps(run, indent=2) + '\n')

  outages.with_retries(write, file, 'written')
