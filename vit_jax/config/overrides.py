"""The --config flag: a config file, and every key of it as a flag."""

import ast
import contextlib
import difflib
import re
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from vit_jax.config import keys as keys_lib
from vit_jax.config import plugins
from vit_jax.config.completion import (
  Config,
  complete,
  complete_section,
  flatten,
  typed,
)
from vit_jax.config.loading import load
from vit_jax.config.plugins import Nested
from vit_jax.config.sections import EVALS, SECTIONS
from vit_jax.errors import UserError, closest

# What a tuple holds: its name, and an example of the whole.
_MEMBERS = {
  int: ('whole number', '(384, 512)'),
  float: ('number', '(0.5, 0.1)'),
  str: ('name in quotes', "('a', 'b')"),
}


def define_flag(argv: list[str]) -> None:
  """Defines `--config` with every key of the config that argv names.

  A section whose `name` is overridden is completed again for that name; keys
  that both have keep their values.

  Raises:
    UserError: there is no config, or `load` raises.
  """
  given = [arg for arg in argv if re.match(r'--?config(=|$)', arg)]
  if any(re.match(r'--?help|-h$', arg) for arg in argv):
    flags.DEFINE_string('config', None, 'Path of a config file[:arguments].')
    return
  if len(given) != 1:
    raise UserError(
      f'--config=FILE.py must be given once; it was given {len(given)} times.'
      f'{_meant_config(argv) if not given else ""} `python -m vit_jax.configs` '
      'lists the shipped ones.'
    )
  at = argv.index(given[0])
  path = given[0].partition('=')[2]
  if '=' not in given[0]:
    path = argv.pop(at + 1) if at + 1 < len(argv) else ''
  argv.pop(at)
  _join_values(argv)
  config = load(path)
  renamed = [re.match(r'--?config\.(.+)\.name=(.+)', arg) for arg in argv]
  # A section before those that are nested in it.
  for match in sorted(filter(None, renamed), key=lambda m: m[1].count('.')):
    config = _renamed(config, match[1], match[2], argv)
  _take_nones(argv, config)
  _check_keys(argv, config)
  config_flags.DEFINE_config_dict('config', config)
  flags.DEFINE_string('config_path', path, 'Set by --config.')


def _meant_config(argv: list[str]) -> str:
  """Returns a hint if an argument looks like a config without its flag."""
  for arg in argv[1:]:
    path = re.fullmatch(r'(?:--?\w+=)?([^-=].*\.(?:py|json)(?::.*)?)', arg)
    if path:
      return f' Did you mean --config={path[1]}?'
  return ''


def _join_values(argv: list[str]) -> None:
  """Turns `--config.key value` into `--config.key=value`, in place."""
  for at in range(len(argv) - 2, 0, -1):
    is_key = re.fullmatch(r'--?config\.[^=]+', argv[at])
    if is_key and not argv[at + 1].startswith('-'):
      argv[at] += '=' + argv.pop(at + 1)


def _check_keys(argv: list[str], config: Config) -> None:
  """Raises UserError for an override of a key that does not exist."""
  values = flatten(config)
  keys = list(values)
  for arg in argv:
    match = re.match(r'--?(?:no)?config\.([^=]+)=?(.*)', arg)
    if not match:
      continue
    if match[1] in keys and keys_lib.mark(config, match[1]) is None:
      if keys_lib.value_type(config, match[1])[0] is tuple:
        member = keys_lib.member_type(config, match[1])
        _check_members(match[1], match[2], member)
      continue
    if match[1] in keys or any(key.startswith(match[1] + '.') for key in keys):
      first = [*_section_keys(match[1], keys), f'{match[1]}.name'][0]
      if match[1].startswith('evals.') and match[2] in ('None', '', '{}'):
        raise UserError(
          f'config.{match[1]}={match[2]}: an evaluator cannot be removed by a '
          f'flag; --config.{match[1]}.every=100% runs it once, at the end. A '
          'config file of your own can delete it.'
        )
      raise UserError(
        f'config.{match[1]} is a section: set its keys, as in '
        f'--config.{first}=….'
      )
    section = match[1].rpartition('.')[0]
    if keys_lib.mark(config, section) and values.get(section, '') is None:
      raise UserError(
        f'config.{match[1]}: {section} is not set; choose one by '
        f'--config.{section}.name=….'
      )
    meant = _MEANT.get(match[1].rpartition('.')[2])
    if meant:  # a nearer spelling in this section would mislead
      answer = f'did you mean --{meant}?'
    else:
      answer = f'{closest(match[1], _section_keys(section, keys) or keys)}.'
    raise UserError(f'config.{match[1]} is not a key; {answer}')


def _check_members(key: str, text: str, kind: type) -> None:
  """Raises UserError unless text is a value of a kind, or a tuple of them."""
  found = _literal(text)
  if found is not text:  # Python's own notation, as the parser takes it
    with contextlib.suppress(UserError):
      typed(key, found, tuple, kind)
      return
  what, example = _MEMBERS.get(kind, ('value', '(…, …)'))
  raise UserError(
    f'config.{key} is {text!r}; give one {what}, or several as in '
    f'--config.{key}="{example}".'
  )


def _section_keys(section: str, keys: list[str]) -> list[str]:
  return [key for key in keys if key.rpartition('.')[0] == section]


def _take_nones(argv: list[str], config: Config) -> None:
  """Carries out and removes `--config.key=None` for keys that may be None."""
  for arg in [*argv]:
    match = re.fullmatch(r'--?config\.([^=]+)=None', arg)
    if match and keys_lib.value_type(config, match[1])[1]:
      argv.remove(arg)
      *outer, last = match[1].split('.')
      section = config
      for part in outer:
        section = section[part]
      section[last] = None


def _renamed(
  config: Config, section: str, name: str, argv: list[str]
) -> Config:
  """Returns the config with another plug-in in one section.

  Keys without a default are looked up in argv, where they must be given.
  """
  mark = keys_lib.mark(config, section)
  if mark is None or '{name}' not in mark.pattern:
    return config  # the flag parser will say that there is no such key
  values = parent = config.to_dict()
  *outer, last = section.split('.')
  for part in outer:
    parent = parent[part]
  parent[last] = _with_name(parent[last] or {}, mark, section, name, argv)
  return complete(ConfigDict(values))


def _with_name(
  values: dict[str, Any], mark: Nested, section: str, name: str, argv: list[str]
) -> dict[str, Any]:
  """Returns a section's values that a plug-in accepts.

  Keys without a default are taken from argv.
  """
  allowed = mark.keys(name)
  kept = {k: v for k, v in values.items() if k in allowed}
  for arg in argv:
    match = re.match(rf'--?config\.{re.escape(section)}\.(\w+)=(.*)', arg)
    if match and match[1] in allowed:
      parameter = allowed[match[1]]
      if parameter.default is parameter.empty:
        kind, _ = plugins.value_type(parameter.annotation)
        kept[match[1]] = match[2] if kind is str else _literal(match[2])
  return {**kept, 'name': name}


def _literal(text: str) -> Any:
  """Parses the number or tuple of a flag; returns its text if it is neither."""
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text  # the completion will say which type it must have


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
    mark = Nested(EVALS if parent else SECTIONS[section])
    name = values.get('name', '')
    for arg in args:
      match = re.match(rf'--?config\.{re.escape(section)}\.name=(.+)', arg)
      name = match[1] if match else name
    values = _with_name(values, mark, section, name, args)
    if '{name}' not in mark.pattern:
      del values['name']
    completed = complete_section(section, mark, values)
    (config[parent] if parent else config)[last] = completed
  args = [*args]
  _take_nones(args, config.lock())
  _check_keys(args, config)
  own, argv = flags.FlagValues(), ['', *args]
  config_flags.DEFINE_config_dict(
    'config', config, flag_values=own, sys_argv=argv
  )
  try:
    own(argv)
  except flags.Error as error:
    raise UserError(unknown_flag_message(error)) from error
  return own.config


# What people write, and the keys that they mean.
_MEANT = {
  'lr': 'config.schedule.base_lr',
  'learning_rate': 'config.schedule.base_lr',
  'epochs': 'config.total',
  'num_epochs': 'config.total',
  'steps': 'config.total',
  'wd': 'config.optimizer.weight_decay',
  'workers': 'config.reader.threads',
  'num_workers': 'config.reader.threads',
  'output_dir': 'workdir',
  'resume': 'workdir',
}


def unknown_flag_message(error: flags.Error) -> str:
  """Returns the message for a flag that absl does not accept."""
  text = str(error)
  match = re.search(r"Unknown command line flag '(.+?)'", text)
  if not match:
    number = 'convert' in text or 'invalid literal' in text
    return f'{text}; give a number, such as 0.001 or 64.' if number else text
  known = [*flags.FLAGS]
  if 'config_path' in known:  # only keys that were given are flags by now
    known += [f'config.{key}' for key in flatten(flags.FLAGS['config'].default)]
  meant = _MEANT.get(match[1].rpartition('.')[2])
  near = [meant] if meant in known else []
  near += [flag for flag in known if flag.rpartition('.')[2] == match[1]]
  near += difflib.get_close_matches(match[1], known, n=1, cutoff=0.5)
  hint = f'did you mean --{near[0]}? ' if near else ''
  return f'there is no flag --{match[1]}; {hint}--help lists all of them.'
