"""Converts the values of a config to the types of their keys."""

import ast
import contextlib
from typing import Any

from absl import flags

from vit_jax.config import plugins
from vit_jax.errors import UserError

_PARSERS: dict[type, flags.ArgumentParser] = {
  bool: flags.BooleanParser(),
  int: flags.IntegerParser(),
  float: flags.FloatParser(),
}
_EXAMPLES = {
  int: ': give a whole number, such as 64',
  float: ': give a number, such as 0.001',
  bool: ': give true or false',
}
# Type of a tuple's members: its name in messages, and an example of a tuple.
_MEMBERS = {
  int: ('whole number', '(384, 512)'),
  float: ('number', '(0.5, 0.1)'),
  str: ('name in quotes', "('a', 'b')"),
}


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
  kind, optional = plugins.value_type(annotation)
  member = plugins.member_type(annotation)
  if optional and is_none(value):
    return None
  if not isinstance(value, FlagText):
    return _converted(key, value, kind, member)
  parsed = _parsed(value, kind)
  if kind is not tuple:
    return _converted(key, parsed, kind)
  with contextlib.suppress(UserError):
    if parsed != value:
      return _converted(key, parsed, kind, member)
  name, example = _MEMBERS.get(member, ('value', '(…, …)'))
  raise UserError(
    f'{key} is {str(value)!r}; give one {name}, or several as in '
    f'--{key}="{example}".'
  )


def is_none(value: Any) -> bool:
  """Returns whether a value is None, or the text of a flag that says so."""
  return value is None or (isinstance(value, FlagText) and value == 'None')


def _parsed(text: FlagText, kind: type) -> Any:
  """Parses the text of a flag; returns the text if it has another type."""
  if kind is str:
    return str(text)
  parser = _PARSERS.get(kind)
  with contextlib.suppress(SyntaxError, ValueError):
    return parser.parse(text) if parser else ast.literal_eval(text)
  return str(text)


def _converted(key: str, value: Any, kind: type, member: type = object) -> Any:
  if kind is tuple:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(_converted(key, entry, member) for entry in values)
  if kind is float and type(value) is int:
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise UserError(
      f'{key} is {value!r}; it must be of type {kind.__name__}'
      f'{_EXAMPLES.get(kind, "")}.'
    )
  return value
