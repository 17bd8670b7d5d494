"""Loads configs from Python files with `get_config`, or from a config.json.

Shipped files are found in a checkout and in an installed package.
"""

import contextlib
import importlib.util
import inspect
import json
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax.config.completion import complete
from vit_jax.config.schema import Config
from vit_jax.errors import UserError, closest

_PACKAGE = pathlib.Path(__file__).parents[1]
# Functions that a file can define, and the command that calls each of them.
_COMMANDS = {'get_config': 'train', 'get_sweep': 'sweep', 'get_study': 'study'}


def directory(name: str = 'configs') -> pathlib.Path:
  """Returns the path of configs/ or launch/, installed or in a checkout."""
  installed = _PACKAGE / 'shipped' / name  # setup.py copies it there
  return installed if installed.is_dir() else _PACKAGE.parent / name


def find(path: str) -> pathlib.Path:
  """Returns the file of a config, also for `configs/…` without a checkout.

  A file in the working directory has precedence over a shipped one.
  """
  file = pathlib.Path(path).expanduser()
  if file.exists() or file.parts[:1] != ('configs',):
    return file
  shipped = directory().joinpath(*file.parts[1:])
  return shipped if shipped.exists() else file


def shipped_paths() -> list[str]:
  """Returns the paths of all shipped configs, as `find` accepts them."""
  root = directory()
  return [
    f'configs/{file.relative_to(root).as_posix()}'
    for file in sorted(root.rglob('*.py'))
  ]


def load(path_and_arg: str) -> Config:
  """Loads and completes the config of a file.

  Args:
    path_and_arg: a Python file with `get_config`, and its argument
      ('configs/vit.py:variant=B/16'), or a run's config.json, local or remote.

  Raises:
    UserError: the file does not exist, it does not define a config, the
      argument is wrong, or `config.complete` raises.
  """
  # The argument of a Python file may be the path of a JSON file.
  is_json = path_and_arg.partition('.py:')[0].endswith('.json')
  if is_json:
    origin = path_and_arg
    try:
      values = json.loads(epath.Path(origin).expanduser().read_text())
    except (OSError, ValueError) as error:
      raise UserError(
        f'the config {origin} cannot be read: {error}.'
      ) from error
  else:
    origin = f'get_config() of {path_and_arg.partition(":")[0]}'
    values = call(path_and_arg)
  try:
    if not isinstance(values, dict | ConfigDict):
      raise TypeError(f'{values!r:.100} is neither a ConfigDict nor a dict')
    config = values if isinstance(values, ConfigDict) else ConfigDict(values)
  except (TypeError, ValueError) as error:  # such as a key with a dot
    raise UserError(f'{origin} is not a config: {error}.') from error
  return complete(config)  # does not change a completed config


def call(path_and_arg: str, function: str = 'get_config') -> Any:
  """Calls a function of a Python file and returns its result.

  Args:
    path_and_arg: path of the file, and the function's argument after a colon.
    function: name of the function.

  Raises:
    UserError: the file or function does not exist, or the function raises.
  """
  path, _, arg = path_and_arg.partition(':')
  file = find(path)
  if not file.is_file() or file.suffix != '.py':
    others = map(str, pathlib.Path(path).parent.glob('*.py'))
    allowed = dict.fromkeys([*shipped_paths(), *others])
    raise UserError(
      f'there is no config file {path!r} (FILE.py, or the config.json of a '
      f'run); {closest(path, allowed)}.'
    )
  spec = importlib.util.spec_from_file_location(f'_config_{file.stem}', file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  with _errors_located(str(spec.origin)):
    spec.loader.exec_module(module)
  get = getattr(module, function, None)
  if not callable(get):
    hint = 'it is not a config file'
    commands = [_COMMANDS[name] for name in _COMMANDS if hasattr(module, name)]
    if commands:
      hint = f'use it with python -m vit_jax.{commands[0]} --config={path}'
    raise UserError(f'{path} does not define {function}(): {hint}.')
  if arg and not inspect.signature(get).parameters:
    raise UserError(f'{path} takes no argument; got {arg!r} after the colon.')
  with _errors_located(str(spec.origin)):
    return get(arg) if arg else get()


@contextlib.contextmanager
def _errors_located(file: str) -> Iterator[None]:
  """Adds the line of the config file to the message of an error in it.

  Raises:
    UserError: the code in the body raised an error.
  """
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    line = lines[-1] if lines else getattr(error, 'lineno', None)
    suffix = f', line {line}' if line else ''
    text = f'{type(error).__name__}: {" ".join(str(error).split())}'
    raise UserError(f'{file}{suffix}: {text}.') from error
