"""Completes a config: adds defaults, checks its keys, and converts types."""

import ast
import contextlib
import dataclasses
import json
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_dict

from vit_jax.config import schema
from vit_jax.config.keys import top_level
from vit_jax.config.schema import MARKS, Config, Nested
from vit_jax.errors import UserError, closest

# Names of other projects, and the corresponding flags.
SYNONYMS = {
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

_PARSERS: dict[type, flags.ArgumentParser] = {
  bool: flags.BooleanParser(),
  int: flags.IntegerParser(),
  float: flags.FloatParser(),
}

_EXAMPLES = {
  int: ': give a whole number, such as 64',
  float: ': give a number, such as 0.001',
  bool: ': give true or false',
  tuple: ": give one value, or several, such as (384, 512) or ('a', 'b')",
}


def complete(config: ConfigDict) -> Config:
  """Adds the default of every missing key to a config, and locks the config.

  Args:
    config: values of a config file and of flags.

  Returns:
    The completed config.

  Raises:
    UserError: a key is unknown, a key without a default is missing, or a value
      has a wrong type.
  """
  values = config.to_dict()
  top = {key: value for key, value in values.items() if key not in MARKS}
  result = ConfigDict(_completed('', schema.config_keys(top_level), top))
  for section, mark in MARKS.items():
    result[section] = complete_section(section, mark, values.get(section, {}))
  return result.lock()


def complete_section(
  path: str, mark: Nested, values: Any, drop_unknown: bool = False
) -> ConfigDict:
  """Adds the default of every missing key to one section.

  Args:
    path: path of the section, for messages.
    mark: `Nested` mark of the section, which determines its constructor.
    values: values of the config file and of flags.
    drop_unknown: whether to leave out keys that the constructor does not have,
      unless they are set by flags. They are always left out if a flag sets the
      name, because they may belong to the name in the config file.

  Raises:
    UserError: see `complete`.
  """
  has_name = '{name}' in mark.pattern  # `name` selects the constructor
  if mark.many and values in (None, 'None'):
    values = {}
  if not isinstance(values, Mapping | ConfigDict):
    key = ('NAME.' if mark.many else '') + ('name' if has_name else 'KEY')
    raise UserError(
      f'config.{path} is {values!r}; it is a section: give its keys, such as '
      f'--config.{path}.{key}=….'
    )
  if mark.many:
    member = dataclasses.replace(mark, many=False)
    return ConfigDict(
      {
        name: complete_section(f'{path}.{name}', member, section, drop_unknown)
        for name, section in values.items()
      }
    )
  name: Any = ''
  arguments, result = dict(values), {}
  if has_name:
    default = schema.DEFAULT_NAMES.get(path.rpartition('.')[2])
    name = arguments.pop('name', default)
    if is_none(name):
      raise UserError(
        f'config.{path}.name is missing; '
        f'{closest("", schema.names(mark.pattern))}.'
      )
    result['name'] = typed(f'config.{path}.name', name, str)
  keys = mark.keys(name)
  if drop_unknown or isinstance(name, FlagText):
    arguments = {
      key: value
      for key, value in arguments.items()
      if key in keys or _has_flag(value)
    }
  return ConfigDict(result | _completed(f'{path}.', keys, arguments))


def _has_flag(value: Any) -> bool:
  """Returns whether a value, or one of a section, is the text of a flag."""
  if isinstance(value, Mapping | ConfigDict):
    return any(map(_has_flag, value.values()))
  return isinstance(value, FlagText)


def _completed(
  prefix: str, allowed: dict[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the values of one section, completed with defaults.

  Args:
    prefix: path of the section with a dot at the end; '' for the top level.
    allowed: parameters of the constructor by key.
    values: values of the config file and of flags.

  Returns:
    Values by key. A None is a typed placeholder, to which a value can be
    assigned.
  """
  unknown = [str(key) for key in values if key not in allowed]
  if unknown:
    known = allowed if prefix else [*allowed, *MARKS]
    raise unknown_key(prefix, unknown[0], known)
  result = {}
  for key, parameter in allowed.items():
    value = values.get(key, parameter.default)
    if value is parameter.empty:
      raise UserError(f'config.{prefix}{key} is missing: it has no default.')
    mark = schema.nested(parameter.annotation)
    kind, _, optional = schema.value_type(parameter.annotation)
    if mark is None:
      value = typed(f'config.{prefix}{key}', value, parameter.annotation)
      result[key] = config_dict.placeholder(kind) if value is None else value
    elif optional and is_none(value):
      # A placeholder could not be replaced by a section.
      result[key] = None
    else:
      result[key] = complete_section(prefix + key, mark, value)
  return result


def unknown_key(prefix: str, key: str, known: Iterable[str]) -> UserError:
  """Returns the error for a key that does not exist.

  Args:
    prefix: path of the section with a dot at the end; '' for the top level.
    key: path of the key within the section.
    known: keys of the section.
  """
  # A similar spelling in this section would mislead if there is a synonym.
  synonym = SYNONYMS.get(key.rpartition('.')[2])
  hint = f'did you mean --{synonym}?' if synonym else f'{closest(key, known)}.'
  return UserError(f'config.{prefix}{key} is not a key; {hint}')


class FlagText(str):
  """Text of a flag, which is parsed once the type of its key is known."""


def typed(key: str, value: Any, annotation: Any) -> Any:
  """Converts a value to the type of its key.

  An int is also accepted for a float, and a single value for a tuple.

  Args:
    key: path of the key, for messages.
    value: value in a config file, or the text of a flag.
    annotation: annotation of the constructor's parameter.

  Raises:
    UserError: the value has another type.
  """
  kind, member, optional = schema.value_type(annotation)
  if optional and is_none(value):
    return None
  parsed = _parsed(value, kind) if isinstance(value, FlagText) else value
  # The text of a flag for a tuple must be a Python literal. Other text, such as
  # a,b without quotes, is not parsed.
  is_literal = not (
    kind is tuple and isinstance(value, FlagText) and parsed == value
  )
  if is_literal:
    with contextlib.suppress(TypeError):
      return _converted(parsed, kind, member)
  of = f' of {member.__name__}' if kind is tuple else ''
  example = _EXAMPLES.get(kind, '')
  if not is_literal and member is str:
    names = tuple(name.strip() for name in parsed.split(',') if name.strip())
    example = f': give a tuple, in quotes: --{key}="{names}"'
  elif not is_literal:
    example += ", in quotes: \"('a', 'b')\""
  raise UserError(
    f'{key} is {value!r}; it must be of type {kind.__name__}{of}{example}.'
  )


def is_none(value: Any) -> bool:
  """Returns whether a value is None, or the text of a flag that says so."""
  return value is None or (isinstance(value, FlagText) and value == 'None')


def _parsed(text: FlagText, kind: type) -> Any:
  """Parses the text of a flag; returns the text if it cannot be parsed."""
  if kind is str:
    return str(text)
  parser = _PARSERS.get(kind)
  errors = SyntaxError, ValueError, TypeError, MemoryError, RecursionError
  with contextlib.suppress(*errors):
    return parser.parse(text) if parser else ast.literal_eval(text)
  return str(text)


def _converted(value: Any, kind: type, member: type) -> Any:
  """Converts an int to float and a value to a tuple.

  Raises:
    TypeError: the value has another type.
  """
  if kind is tuple:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(_converted(entry, member, object) for entry in values)
  if kind is float and type(value) is int:
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise TypeError
  return value


def parse_arg(
  arg: str | None,
  choices: Mapping[str, Iterable[Any]] | None = None,
  /,
  **defaults: Any,
) -> types.SimpleNamespace:
  """Parses the argument of a config file, such as 'key=value,key=value'.

  A value may contain commas: a comma separates two arguments only if `key=`, a
  known key, another comma or the end of the text follows.

  Args:
    arg: text after the colon, or None.
    choices: allowed values by key, for keys that take no others.
    **defaults: allowed keys with their defaults, which determine the types.

  Raises:
    UserError: a key is unknown, or a value has another type or is not allowed.
  """
  values = dict(defaults)
  comma = rf',(?=\w+=|(?:{"|".join(map(re.escape, defaults))})?(?:,|$))'
  for argument in filter(None, re.split(comma, arg or '')):
    key, equals, text = argument.partition('=')
    if key not in defaults or not equals:
      raise UserError(
        f'config argument {argument!r} is not key=value with a known key; '
        f'{closest(key, defaults)}.'
      )
    name = f'config argument {key}'
    values[key] = typed(name, FlagText(text), type(defaults[key]))
  for key, allowed in (choices or {}).items():
    if values[key] not in (allowed := tuple(allowed)):
      hint = closest(str(values[key]), map(str, allowed))
      raise UserError(f'there is no {key}={values[key]} here; {hint}.')
  return types.SimpleNamespace(**values)


def flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """Returns a flat dict {'model.depth': 24, …}, with tuples as lists."""
  flat = {}
  values = config.to_dict() if isinstance(config, ConfigDict) else config
  for key, value in json.loads(json.dumps(values)).items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


def to_json(config: Config) -> str:
  """Returns a completed config as indented JSON."""
  return json.dumps(config.to_dict(), indent=2) + '\n'


def from_dict(values: dict[str, Any]) -> Config:
  """Returns the config whose values `to_json` wrote.

  Raises:
    UserError: a key does not exist; see `complete`.
  """
  return complete(ConfigDict(values))
