"""Defines the flag --config, and a flag for every key of the config."""

import copy
import difflib
import re
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from vit_jax.config import completion
from vit_jax.config.loading import load
from vit_jax.config.schema import MARKS, Config
from vit_jax.errors import UserError


class _ConfigParser(flags.ArgumentParser):
  """Parser of --config: loads the file, and applies the flags of its keys."""

  def __init__(self, args: list[str]):
    """Stores the flags of keys.

    Args:
      args: result of `extract`.
    """
    super().__init__()
    self._args = args

  def parse(self, argument: Any) -> Config:
    """Returns the config of a file, with all overrides."""
    flags.FLAGS.config_path = argument
    try:
      values = load(argument).to_dict()
      _set_flags(values, self._args)
      return completion.complete(ConfigDict(values))
    except (TypeError, ValueError, OverflowError) as error:
      # absl would report these as wrong flags, but they are bugs.
      raise RuntimeError(f'{argument}: {error}') from error


def define_flag(argv: list[str]) -> None:
  """Defines --config; its value is a config with the overrides in argv.

  If the `name` of a section is overridden, the section keeps the values of keys
  that both constructors have. When flags are parsed, a UserError is raised if a
  key does not exist, a value has a wrong type, or `load` raises.

  Args:
    argv: command line, from which `--config.key=value` are removed.
  """
  flags.DEFINE_string('config_path', '', 'Set by --config.')
  parser = _ConfigParser(extract(argv))
  if sum(bool(re.match('--?config(=|$)', word)) for word in argv) > 1:
    raise UserError('--config is given twice: give it once.')
  flags.DEFINE(parser, 'config', None, 'Path of a config file[:arguments].')
  flags.register_validator(
    'config',
    lambda config: config is not None,
    message='give --config=FILE.py; `python -m vit_jax.configs` lists the '
    'shipped configs',
  )


def extract(argv: list[str], prefix: str = 'config') -> list[str]:
  """Removes all `--config.key=value` from argv and returns them, for `apply`.

  Commands use it that parse their flags before a config is loaded.

  Args:
    argv: command line.
    prefix: word before the key; replaced by 'config' in the result.
  """
  for at in range(len(argv) - 2, 0, -1):
    is_key = re.fullmatch(rf'--?{prefix}\.[^=]+', argv[at])
    # A hyphen begins a flag unless a digit, or a point and a digit, follows.
    is_followed_by_flag = re.match(r'-(?!\.?\d)', argv[at + 1])
    if is_key and not is_followed_by_flag:  # --config.key value
      argv[at] += '=' + argv.pop(at + 1)
  pattern = rf'(--?(?:no)?){prefix}\.'
  extracted = [arg for arg in argv if re.match(pattern, arg)]
  argv[:] = [arg for arg in argv if arg not in extracted]
  return [re.sub(f'^{pattern}', r'\1config.', arg) for arg in extracted]


def apply(sections: dict[str, dict[str, Any]], args: list[str]) -> Config:
  """Completes some sections of a config, and applies overrides to them.

  Args:
    sections: values such as {'source': {…}, 'evals': {'val': {…}}}. Keys that
      the constructors do not have (any more) are left out.
    args: result of `extract`.

  Returns:
    A config that has only these sections.

  Raises:
    UserError: an overridden key does not exist, a key without a default is
      missing, or a value is invalid.
  """
  if any(text.startswith('--config.image_size') for text in args):
    raise UserError('config.image_size is not used here: give --image_size.')
  values = copy.deepcopy({'evals': {}, **sections})
  _set_flags(values, args)
  config = ConfigDict()
  for section, mark in MARKS.items():
    if section in values:
      config[section] = completion.complete_section(
        section, mark, values[section], drop_unknown=True
      )
  return config.lock()


def _set_flags(values: dict[str, Any], args: list[str]) -> None:
  """Sets keys of a config to the texts of their flags, in place.

  The type of a key, and whether its section has it, are checked when the
  section is completed, because they depend on the section's name, which another
  flag may change.

  Args:
    values: config as a dict.
    args: result of `extract`.

  Raises:
    UserError: the section of a key does not exist.
  """
  keys = completion.flatten(values)
  parsed = list(map(_parsed, args))
  named = {key.rpartition('.')[0] for key, _ in parsed if key.endswith('.name')}
  for key, text in parsed:
    section, (*outer, last) = values, key.split('.')
    is_new = False
    for depth, part in enumerate(outer):
      # Flags create a section in place of None, a further section within
      # another if they set its name, and any section within a new one. Whether
      # they may exist is checked when the config is completed.
      is_unset = section.get(part, '') in (None, 'None')
      path = '.'.join(outer[: depth + 1])
      is_further = depth > 0 and part not in section and path in named
      if is_new or is_unset or is_further:
        is_new = True
        section[part] = {}
      inner = section.get(part)
      if not isinstance(inner, dict):
        if section is values.get('evals'):
          raise completion.unknown_key('evals.', part, section)
        raise completion.unknown_key('', key, keys)
      section = inner
    if not outer and last not in values:
      raise completion.unknown_key('', key, keys)
    if outer == ['evals'] and text == 'None':  # leaves an evaluator out
      section.pop(last, None)
    else:
      section[last] = completion.FlagText(text)


def _parsed(arg: str) -> tuple[str, str]:
  """Returns the key and the text of an argument that `extract` returned."""
  match = re.fullmatch(r'--?(no)?config\.([^=]+)(?:=(.*))?', arg, re.DOTALL)
  assert match is not None, arg
  text = match[3]
  if text is None:  # --config.key or --noconfig.key
    text = 'false' if match[1] else 'true'
  return match[2], text


def unknown_flag_message(error: flags.Error) -> str:
  """Returns the message for a flag that absl does not accept."""
  text = str(error)
  match = re.search(r"Unknown command line flag '(.+?)'", text)
  if not match:
    number = 'convert' in text or 'invalid literal' in text
    return f'{text}; give a number, such as 0.001 or 64.' if number else text
  names = [*flags.FLAGS]
  if 'config_path' in names and flags.FLAGS['config'].value is not None:
    names += [
      f'config.{key}' for key in completion.flatten(flags.FLAGS['config'].value)
    ]
  synonym = completion.SYNONYMS.get(match[1].rpartition('.')[2])
  near = [synonym] if synonym in names else []
  near += [flag for flag in names if flag.rpartition('.')[2] == match[1]]
  near += difflib.get_close_matches(match[1], names, n=1)
  hint = f'did you mean --{near[0]}? ' if near else ''
  return f'there is no flag --{match[1]}; {hint}--help lists all of them.'
