"""The --config flag: a config file, and every key of it as a flag."""

import contextlib
import difflib
import importlib.util
import inspect
import json
import pathlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

from absl import flags
from etils import epath
from ml_collections import ConfigDict, config_flags

from vit_jax.config import plugins
from vit_jax.config.completion import (
  EVALS,
  SECTIONS,
  Config,
  complete,
  complete_section,
  flatten,
  is_optional,
)
from vit_jax.errors import UserError, closest


def load(path_and_arg: str) -> Config:
  """The completed config of a file.

  Args:
    path_and_arg: a Python file with `get_config`, and its argument
      ('configs/vit.py:variant=B/16'), or a run's config.json, local or remote.

  Raises:
    UserError: no such file, none that holds a config, a bad argument, or what
      `config.complete` raises.
  """
  if path_and_arg.endswith('.json'):
    values, what = _resolved(path_and_arg), path_and_arg
  else:
    path, _, arg = path_and_arg.partition(':')
    values, what = _run_file(path, arg), f'get_config() of {path}'
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
  """What a JSON file holds."""
  try:
    return json.loads(epath.Path(path).expanduser().read_text())
  except (OSError, ValueError) as error:
    raise UserError(f'the config {path} cannot be read: {error}.') from error


def _run_file(path: str, arg: str) -> Any:
  """What `get_config` of a Python file returns."""
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    resolved = file / 'config.json'  # of a workdir
    there = [resolved] if resolved.is_file() else file.parent.glob('*.py')
    near = closest(path, map(str, there))
    raise UserError(f'there is no config file {path!r}; {near}.')
  if file.suffix != '.py':
    raise UserError(
      f'the config {path} is neither a Python file (.py) nor a config.json.'
    )
  spec = importlib.util.spec_from_file_location(f'_config_{file.stem}', file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  with _blaming(str(spec.origin)):
    spec.loader.exec_module(module)
  get_config = getattr(module, 'get_config', None)
  if not callable(get_config):
    raise UserError(f'{path} defines no get_config(): it is no config file.')
  if arg and not inspect.signature(get_config).parameters:
    raise UserError(f'{path} takes no argument; got {arg!r} after the colon.')
  with _blaming(str(spec.origin)):
    return get_config(arg) if arg else get_config()


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


def define_flag(argv: list[str]) -> None:
  """Defines `--config` with every key of the config that argv names.

  A section whose `name` is overridden is completed anew for that name, keeping
  the keys that both have.

  Raises:
    UserError: no config, or what `load` raises.
  """
  given = [arg for arg in argv if re.match(r'--?config(=|$)', arg)]
  if any(re.match(r'--?help', arg) for arg in argv):
    flags.DEFINE_string('config', None, 'Path of a config file[:arguments].')
    return
  if len(given) != 1:
    raise UserError(
      f'--config=FILE.py is needed, once; it came {len(given)} times.'
    )
  at = argv.index(given[0])
  path = given[0].partition('=')[2]
  if '=' not in given[0]:
    path = argv.pop(at + 1) if at + 1 < len(argv) else ''
  argv.pop(at)
  _join_values(argv)
  config = load(path)
  for arg in argv:
    match = re.match(r'--?config\.(.+)\.name=(.+)', arg)
    if match:
      config = _renamed(config, match[1], match[2], argv)
  _check_keys(argv, config)
  _take_nones(argv, config)
  config_flags.DEFINE_config_dict('config', config)
  flags.DEFINE_string('config_path', path, 'Set by --config.')


def _join_values(argv: list[str]) -> None:
  """Turns `--config.key value` into `--config.key=value`, in place."""
  for at in range(len(argv) - 2, 0, -1):
    is_key = re.fullmatch(r'--?config\.[^=]+', argv[at])
    if is_key and not argv[at + 1].startswith('-'):
      argv[at] += '=' + argv.pop(at + 1)


def _check_keys(argv: list[str], config: Config) -> None:
  """Raises UserError for an override of something that is no key."""
  values = flatten(config)
  keys = list(values)
  for arg in argv:
    match = re.match(r'--?(?:no)?config\.([^=]+)=?(.*)', arg)
    if not match:
      continue
    if match[1] in keys:
      if isinstance(values[match[1]], list):
        _check_numbers(match[1], match[2])
      continue
    if any(key.startswith(match[1] + '.') for key in keys):
      raise UserError(
        f'config.{match[1]} is a section: set its keys, as in '
        f'--config.{_section_keys(match[1], keys)[0]}=….'
      )
    section = match[1].rpartition('.')[0]
    allowed = _section_keys(section, keys) or keys
    raise UserError(
      f'config.{match[1]} is no key; {closest(match[1], allowed)}.'
    )


def _check_numbers(key: str, text: str) -> None:
  """Raises UserError unless text is a number or a tuple of numbers."""
  if not re.fullmatch(r'[\[(]?\s*\d+(\s*,\s*\d+)*\s*,?\s*[\])]?', text):
    raise UserError(
      f'config.{key} is {text!r}; give one whole number, or several as in '
      f"--config.{key}='(384, 512)'."
    )


def _section_keys(section: str, keys: list[str]) -> list[str]:
  return [key for key in keys if key.rpartition('.')[0] == section]


def _take_nones(argv: list[str], config: Config) -> None:
  """Carries out and removes `--config.key=None` for keys that may be None."""
  for arg in [*argv]:
    match = re.fullmatch(r'--?config\.([^=]+)=None', arg)
    if match and is_optional(config, match[1]):
      argv.remove(arg)
      config.update_from_flattened_dict({match[1]: None})


def _renamed(
  config: Config, section: str, name: str, argv: list[str]
) -> Config:
  """The config with another plug-in in one section.

  Keys without a default are looked for in argv, where they must be given.
  """
  values = config.to_dict()
  parent = values['evals'] if section.startswith('evals.') else values
  key = section.removeprefix('evals.')
  pattern = EVALS if parent is not values else SECTIONS.get(section, '')
  if key not in parent or '{name}' not in pattern:
    return config  # the flag parser will say that there is no such key
  parent[key] = _with_name(parent[key], pattern, section, name, argv)
  return complete(ConfigDict(values))


def _with_name(
  values: dict[str, Any], pattern: str, section: str, name: str, argv: list[str]
) -> dict[str, Any]:
  """A section's values that the plug-in `name` takes, and what it must have."""
  allowed = plugins.keys(plugins.resolve(pattern, name))
  kept = {k: v for k, v in values.items() if k in allowed}
  for arg in argv:
    match = re.match(rf'--?config\.{re.escape(section)}\.(\w+)=(.*)', arg)
    if match and match[1] in allowed:
      parameter = allowed[match[1]]
      if parameter.default is parameter.empty and parameter.annotation is str:
        kept[match[1]] = match[2]
  return {**kept, 'name': name}


def take(argv: list[str]) -> list[str]:
  """Removes the `--config.key=value` from argv and returns them, for `apply`.

  For commands whose config is known only after the flags are.
  """
  _join_values(argv)
  taken = [arg for arg in argv if re.match(r'--?(no)?config\.', arg)]
  argv[:] = [arg for arg in argv if arg not in taken]
  return taken


def apply(sections: dict[str, dict[str, Any]], args: list[str]) -> Config:
  """Some sections of a config, completed, and overridden.

  Args:
    sections: {'source': {…}, 'evals.val': {…}}; keys that their constructors
      do not take (of another version, perhaps) are left out.
    args: from `take`.

  Returns:
    A config of these sections alone.

  Raises:
    UserError: a key that no section has, a missing one, a wrong value.
  """
  config: Any = ConfigDict({'evals': {}})
  for section, values in sections.items():
    parent, _, last = section.rpartition('.')  # 'evals' or nothing
    pattern = EVALS if parent else SECTIONS[section]
    name = values.get('name', '')
    for arg in args:
      match = re.match(rf'--?config\.{re.escape(section)}\.name=(.+)', arg)
      name = match[1] if match else name
    values = _with_name(values, pattern, section, name, args)
    if '{name}' not in pattern:
      del values['name']
    completed = complete_section(section, pattern, values)
    (config[parent] if parent else config)[last] = completed
  args = [*args]
  _check_keys(args, config.lock())
  _take_nones(args, config)
  own, argv = flags.FlagValues(), ['', *args]
  config_flags.DEFINE_config_dict(
    'config', config, flag_values=own, sys_argv=argv
  )
  try:
    own(argv)
  except flags.Error as error:
    raise UserError(unknown_flag_message(error)) from error
  return own.config


def unknown_flag_message(error: flags.Error) -> str:
  """What to say about a flag that absl did not like."""
  text = str(error)
  match = re.search(r"Unknown command line flag '(.+?)'", text)
  if not match:
    return text
  near = difflib.get_close_matches(match[1], [*flags.FLAGS], n=1, cutoff=0.5)
  hint = f'did you mean --{near[0]}? ' if near else ''
  return f'there is no flag --{match[1]}; {hint}--help lists all of them.'
