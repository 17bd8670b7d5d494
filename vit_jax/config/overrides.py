"""Defines the flag --config, and a flag for every key of the config."""

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

# Type of a tuple's members: its name in messages, and an example of a tuple.
_MEMBERS = {
  int: ('whole number', '(384, 512)'),
  float: ('number', '(0.5, 0.1)'),
  str: ('name in quotes', "('a', 'b')"),
}


def define_flag(argv: list[str]) -> None:
  """Defines a flag for every key of the config that argv selects.

  If the `name` of a section is overridden, the section is completed again for
  that name, and keeps the values of keys that both have.

  Args:
    argv: command line, from which --config is removed.

  Raises:
    UserError: --config is missing, a flag names a key that does not exist, or
      `load` raises.
  """
  given = [arg for arg in argv if re.match(r'--?config(=|$)', arg)]
  if any(re.match(r'--?help|-h$', arg) for arg in argv):
    flags.DEFINE_string('config', None, 'Path of a config file[:arguments].')
    return
  if len(given) != 1:
    raise UserError(
      f'--config=FILE.py must be given once; it was given {len(given)} times.'
      f'{_suggest_config(argv) if not given else ""} `python -m '
      'vit_jax.configs` lists the shipped configs.'
    )
  at = argv.index(given[0])
  path = given[0].partition('=')[2]
  if '=' not in given[0]:
    path = argv.pop(at + 1) if at + 1 < len(argv) else ''
  argv.pop(at)
  _join_values(argv)
  config = load(path)
  selected = [re.match(r'--?config\.(.+)\.name=(.+)', arg) for arg in argv]
  # Outer sections come first, because their names determine the inner ones.
  for match in sorted(filter(None, selected), key=lambda m: m[1].count('.')):
    config = _select(config, match[1], match[2], argv)
  _apply_nones(argv, config)
  _check_keys(argv, config)
  config_flags.DEFINE_config_dict('config', config)
  flags.DEFINE_string('config_path', path, 'Set by --config.')


def _suggest_config(argv: list[str]) -> str:
  """Returns a hint if an argument is a config file without --config=."""
  for arg in argv[1:]:
    path = re.fullmatch(r'(?:--?\w+=)?([^-=].*\.(?:py|json)(?::.*)?)', arg)
    if path:
      return f' Did you mean --config={path[1]}?'
  return ''


def _join_values(argv: list[str]) -> None:
  """Replaces `--config.key value` by `--config.key=value`, in place."""
  for at in range(len(argv) - 2, 0, -1):
    is_key = re.fullmatch(r'--?config\.[^=]+', argv[at])
    if is_key and not argv[at + 1].startswith('-'):
      argv[at] += '=' + argv.pop(at + 1)


def _check_keys(argv: list[str], config: Config) -> None:
  """Checks that all overridden keys exist.

  Raises:
    UserError: a key does not exist, or is a section.
  """
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
          f'config.{match[1]}={match[2]}: a flag cannot remove an evaluator; '
          f'--config.{match[1]}.every=100% runs it once, at the end. To remove '
          'it, delete it in a config file of your own.'
        )
      raise UserError(
        f'config.{match[1]} is a section: set its keys, for example '
        f'--config.{first}=….'
      )
    section = match[1].rpartition('.')[0]
    if keys_lib.mark(config, section) and values.get(section, '') is None:
      raise UserError(
        f'config.{match[1]}: {section} is not set; select one with '
        f'--config.{section}.name=….'
      )
    synonym = _SYNONYMS.get(match[1].rpartition('.')[2])
    if synonym:  # a similar spelling in this section would mislead
      hint = f'did you mean --{synonym}?'
    else:
      hint = f'{closest(match[1], _section_keys(section, keys) or keys)}.'
    raise UserError(f'config.{match[1]} is not a key; {hint}')


def _check_members(key: str, text: str, kind: type) -> None:
  """Checks the text of a flag whose key is a tuple.

  Args:
    key: path of the key.
    text: one value or a tuple, in Python's notation.
    kind: type of the members.

  Raises:
    UserError: the text is neither a value of this type nor a tuple of them.
  """
  value = _literal(text)
  if value is not text:
    with contextlib.suppress(UserError):
      typed(key, value, tuple, kind)
      return
  member, example = _MEMBERS.get(kind, ('value', '(…, …)'))
  raise UserError(
    f'config.{key} is {text!r}; give one {member}, or several as in '
    f'--config.{key}="{example}".'
  )


def _section_keys(section: str, keys: list[str]) -> list[str]:
  return [key for key in keys if key.rpartition('.')[0] == section]


def _apply_nones(argv: list[str], config: Config) -> None:
  """Applies and removes `--config.key=None` for keys that may be None.

  The flags of ml_collections do not accept None.
  """
  for arg in [*argv]:
    match = re.fullmatch(r'--?config\.([^=]+)=None', arg)
    if match and keys_lib.value_type(config, match[1])[1]:
      argv.remove(arg)
      *outer, last = match[1].split('.')
      section = config
      for part in outer:
        section = section[part]
      section[last] = None


def _select(config: Config, section: str, name: str, argv: list[str]) -> Config:
  """Returns the config with another plug-in in one section.

  Args:
    config: completed config.
    section: path of the section.
    name: name of the plug-in.
    argv: command line, which must contain the keys without a default.
  """
  mark = keys_lib.mark(config, section)
  if mark is None or '{name}' not in mark.pattern:
    return config  # `_check_keys` will report the key
  values = parent = config.to_dict()
  *outer, last = section.split('.')
  for part in outer:
    parent = parent[part]
  parent[last] = _with_name(parent[last] or {}, mark, section, name, argv)
  return complete(ConfigDict(values))


def _with_name(
  values: dict[str, Any], mark: Nested, section: str, name: str, argv: list[str]
) -> dict[str, Any]:
  """Returns the name of a plug-in and the values of a section that it accepts.

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
    return text  # `complete` will report a wrong type


def extract(argv: list[str]) -> list[str]:
  """Removes all `--config.key=value` from argv and returns them, for `apply`.

  It is used by commands that parse their flags before they know the config.
  """
  _join_values(argv)
  extracted = [arg for arg in argv if re.match(r'--?(no)?config\.', arg)]
  argv[:] = [arg for arg in argv if arg not in extracted]
  return extracted


def apply(sections: dict[str, dict[str, Any]], args: list[str]) -> Config:
  """Completes some sections of a config, and applies overrides to them.

  Args:
    sections: values such as {'source': {…}, 'evals.val': {…}}. Keys that the
      constructors do not have (any more) are left out.
    args: result of `extract`.

  Returns:
    A config that has only these sections.

  Raises:
    UserError: an overridden key does not exist, a key without a default is
      missing, or a value is invalid.
  """
  config: Any = ConfigDict({'evals': {}})
  for section, values in sections.items():
    parent, _, last = section.rpartition('.')  # parent is 'evals' or ''
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
  _apply_nones(args, config.lock())
  _check_keys(args, config)
  values, argv = flags.FlagValues(), ['', *args]
  config_flags.DEFINE_config_dict(
    'config', config, flag_values=values, sys_argv=argv
  )
  try:
    values(argv)
  except flags.Error as error:
    raise UserError(unknown_flag_message(error)) from error
  return values.config


# Names of other projects, and the corresponding keys.
_SYNONYMS = {
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
  names = [*flags.FLAGS]
  if 'config_path' in names:
    # ml_collections defines flags only for the keys on the command line.
    names += [f'config.{key}' for key in flatten(flags.FLAGS['config'].default)]
  synonym = _SYNONYMS.get(match[1].rpartition('.')[2])
  near = [synonym] if synonym in names else []
  near += [flag for flag in names if flag.rpartition('.')[2] == match[1]]
  near += difflib.get_close_matches(match[1], names, n=1, cutoff=0.5)
  hint = f'did you mean --{near[0]}? ' if near else ''
  return f'there is no flag --{match[1]}; {hint}--help lists all of them.'
