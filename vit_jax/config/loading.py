"""A config from a file: Python with `get_config`, or a run's config.json."""

import contextlib
import importlib.util
import inspect
import json
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any, TypeVar

from etils import epath
from ml_collections import ConfigDict

from vit_jax.config import shipped
from vit_jax.config.completion import Config, complete
from vit_jax.errors import UserError, closest

# What a file must define for which command.
_COMMANDS = {'get_config': 'train', 'get_sweep': 'sweep', 'get_study': 'study'}
T = TypeVar('T')


def load(path_and_arg: str) -> Config:
  """Loads and completes the config of a file.

  Args:
    path_and_arg: a Python file with `get_config`, and its argument
      ('configs/vit.py:variant=B/16'), or a run's config.json, local or remote.

  Raises:
    UserError: the file does not exist, it does not define a config, the
      argument is wrong, or `config.complete` raises.
  """
  if path_and_arg.endswith('.json'):
    values, what = _resolved(path_and_arg), path_and_arg
  else:
    path = path_and_arg.partition(':')[0]
    values, what = call(path_and_arg), f'get_config() of {path}'
  if not isinstance(values, dict | ConfigDict):
    raise UserError(
      f'{what} gives {values!r:.100}; it must be a ConfigDict, as in '
      'configs/quickstart.py, or a dict.'
    )
  try:
    config = values if isinstance(values, ConfigDict) else ConfigDict(values)
  except (TypeError, ValueError) as error:  # such as a key with a dot
    reason = str(error).rstrip('.')
    raise UserError(f'{what} is no config: {reason}.') from error
  return complete(config)  # a complete one stays as it is


def _resolved(path: str) -> Any:
  """Returns the content of a JSON file."""
  try:
    return json.loads(epath.Path(path).expanduser().read_text())
  except (OSError, ValueError) as error:
    raise UserError(f'the config {path} cannot be read: {error}.') from error


def held(path_and_arg: str, function: str, kind: type[T], example: str) -> T:
  """Calls a function of a Python file and checks the type of its result.

  Raises:
    UserError: the result is of another type, or `call` raises.
  """
  found = call(path_and_arg, function)
  if not isinstance(found, kind):
    raise UserError(
      f'{function}() of {path_and_arg} gives {found!r:.100}; it must be a '
      f'{kind.__module__}.{kind.__name__}, as in {example}.'
    )
  return found


def call(path_and_arg: str, function: str = 'get_config') -> Any:
  """Calls a function of a Python file and returns its result.

  Args:
    path_and_arg: path of the file, and the function's argument after a colon.
    function: name of the function.

  Raises:
    UserError: the file or function does not exist, or it fails.
  """
  path, _, arg = path_and_arg.partition(':')
  file = shipped.find(path)
  if not file.is_file():
    resolved = file / 'config.json'  # of a workdir
    there = [resolved] if resolved.is_file() else [*file.parent.glob('*.py')]
    known = {*map(str, there), *([] if resolved.is_file() else shipped.paths())}
    same = [each for each in known if pathlib.Path(each).stem == file.stem]
    raise UserError(
      f'there is no config file {path!r}; {closest(path, same or known)}.'
    )
  if file.suffix != '.py':
    raise UserError(
      f'the config {path} is neither a Python file (.py) nor a config.json.'
    )
  spec = importlib.util.spec_from_file_location(f'_config_{file.stem}', file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  with _blaming(str(spec.origin)):
    spec.loader.exec_module(module)
  get = getattr(module, function, None)
  if not callable(get):
    others = [name for name in _COMMANDS if hasattr(module, name)]
    hint = (
      f'it is for python -m vit_jax.{_COMMANDS[others[0]]} --config={path}'
      if others
      else 'it is no config file'
    )
    raise UserError(f'{path} defines no {function}(): {hint}.')
  if arg and not inspect.signature(get).parameters:
    raise UserError(f'{path} takes no argument; got {arg!r} after the colon.')
  with _blaming(str(spec.origin)):
    return get(arg) if arg else get()


@contextlib.contextmanager
def _blaming(file: str) -> Iterator[None]:
  """Turns an error in a config file into a message with its line."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    line = lines[-1] if lines else getattr(error, 'lineno', None)
    where = f', line {line}' if line else ''
    elsewhere = ''
    if lines and frames[-1].filename != file:
      elsewhere = f' ({frames[-1].filename}, line {frames[-1].lineno})'
    text = ' '.join(str(error).split())
    raise UserError(
      f'the config file {file}{where}: {type(error).__name__}: '
      f'{text}{elsewhere}.'
    ) from error
