"""The --config flag: a config file, and every key of it as a flag."""

import difflib
import importlib.util
import inspect
import pathlib
import re

from absl import flags
from ml_collections import ConfigDict, config_flags

from vit_jax import plugins
from vit_jax.config import (
  EVALS,
  SECTIONS,
  Config,
  complete,
  flatten,
  is_optional,
)
from vit_jax.errors import UserError, closest


def load(path_and_arg: str) -> Config:
  """Runs `get_config` of a config file ('configs/vit.py:variant=B/16').

  Raises:
    UserError: no such file, no `get_config` in it, or a bad argument.
  """
  path, _, arg = path_and_arg.partition(':')
  file = pathlib.Path(path)
  if not file.is_file():
    there = sorted(str(p) for p in file.parent.glob('*.py'))
    raise UserError(
      f'there is no config file {path!r}; {closest(path, there)}.'
    )
  spec = importlib.util.spec_from_file_location(f'_config_{file.stem}', file)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, 'get_config'):
    raise UserError(f'{path} defines no get_config(): it is no config file.')
  if arg and not inspect.signature(module.get_config).parameters:
    raise UserError(f'{path} takes no argument; got {arg!r} after the colon.')
  return module.get_config(arg) if arg else module.get_config()


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
  allowed = plugins.keys(plugins.resolve(pattern, name))
  kept = {k: v for k, v in parent[key].items() if k in allowed}
  for arg in argv:
    match = re.match(rf'--?config\.{re.escape(section)}\.(\w+)=(.*)', arg)
    if match and match[1] in allowed:
      parameter = allowed[match[1]]
      if parameter.default is parameter.empty and parameter.annotation is str:
        kept[match[1]] = match[2]
  parent[key] = {**kept, 'name': name}
  return complete(ConfigDict(values))


def unknown_flag_message(error: flags.Error) -> str:
  """What to say about a flag that absl did not like."""
  text = str(error)
  match = re.search(r"Unknown command line flag '(.+?)'", text)
  if not match:
    return text
  near = difflib.get_close_matches(match[1], [*flags.FLAGS], n=1, cutoff=0.5)
  hint = f'did you mean --{near[0]}? ' if near else ''
  return f'there is no flag --{match[1]}; {hint}--help lists all of them.'
