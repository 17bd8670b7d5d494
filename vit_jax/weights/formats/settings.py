"""Validates the JSON settings that other projects store with weights.

These files are not trusted. A table of rules contains the allowed values of
each key, so that other modules do not have to check them.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.errors import UserError
from vit_jax.files import paths


class Rule(NamedTuple):
  """Condition for the value of one key.

  Attributes:
    holds: function that returns whether a value is allowed.
    allowed: description of the allowed values, which follows "it must be".
  """

  holds: Callable[[Any], bool]
  allowed: str


# {key: Rule, or the Rules for the keys of an object}
Rules = Mapping[str, Any]


def _is_number(value: Any) -> bool:
  # Integers may be too large for a float.
  is_float = isinstance(value, float) and math.isfinite(value)
  return is_float or _is_integer(value)


def _is_integer(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int) -> Rule:
  """Returns a rule for integers in [low, high]."""
  return Rule(
    lambda value: _is_integer(value) and low <= value <= high,
    f'an integer from {low} to {high}',
  )


def number(low: float, high: float) -> Rule:
  """Returns a rule for finite numbers in [low, high]."""
  return Rule(
    lambda value: _is_number(value) and low <= value <= high,
    f'a number from {low:g} to {high:g}',
  )


def choice(names: Iterable[str]) -> Rule:
  """Returns a rule for one of several strings."""
  names = tuple(names)
  return Rule(lambda value: value in names, f'one of {", ".join(names)}')


def several(rule: Rule, low: int, high: int) -> Rule:
  """Returns a rule for lists whose elements satisfy a rule.

  Args:
    rule: condition for each element.
    low: minimum number of elements.
    high: maximum number of elements.
  """
  length = f'{low}' if low == high else f'{low} to {high}'
  return Rule(
    lambda value: (
      isinstance(value, list | tuple)
      and low <= len(value) <= high
      and all(map(rule.holds, value))
    ),
    f'a list of {length} elements, each {rule.allowed}',
  )


def either(*rules: Rule) -> Rule:
  """Returns a rule for values that satisfy one of several rules."""
  return Rule(
    lambda value: any(rule.holds(value) for rule in rules),
    ' or '.join(rule.allowed for rule in rules),
  )


def mapping(rule: Rule, *keys: str) -> Rule:
  """Returns a rule for objects whose values satisfy a rule.

  Args:
    rule: condition for each value.
    *keys: the only keys of the object, all of which are required; if none are
      passed, any keys are allowed.
  """
  return Rule(
    lambda value: (
      isinstance(value, Mapping)
      and (not keys or set(value) == set(keys))
      and all(map(rule.holds, value.values()))
    ),
    f'an object{" of " if keys else ""}{" and ".join(keys)}, each value '
    f'{rule.allowed}',
  )


TEXT = Rule(lambda value: isinstance(value, str), 'a string')
FLAG = Rule(lambda value: isinstance(value, bool), 'true or false')
# Side of an image, pixels; the maximum prevents running out of memory.
SIDE = integer(1, 2**15)
MEAN = several(number(-10, 10), 3, 3)
STD = several(number(1e-3, 10), 3, 3)
NAMES = several(TEXT, 0, 10**6)


def validated(
  path: str | os.PathLike, values: Mapping[str, Any], rules: Rules
) -> dict[str, Any]:
  """Checks settings, and returns them without keys whose value is null.

  Args:
    path: path of the file, for messages.
    values: settings; the values of keys without a rule are not checked.
    rules: conditions for the keys that are used.

  Raises:
    UserError: a value is not allowed.
  """
  return _validated(path, values, rules, '')


def _validated(
  path: str | os.PathLike, values: Any, rules: Rules, prefix: str
) -> dict[str, Any]:
  if not isinstance(values, Mapping):
    raise UserError(
      f'{path}: {prefix.rstrip(".") or "the content"} is '
      f'{_shown(values)}; it must be an object.'
    )
  present = {key: value for key, value in values.items() if value is not None}
  for key, rule in rules.items():
    if key not in present:
      continue
    value = present[key]
    if not isinstance(rule, Rule):
      present[key] = _validated(path, value, rule, f'{prefix}{key}.')
    elif not rule.holds(value):
      raise UserError(
        f'{path}: {prefix}{key} is {_shown(value)}; it must be {rule.allowed}. '
        'Correct the file, or fetch it again.'
      )
  return present


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'


def require(
  path: str | os.PathLike, values: Mapping[str, Any], keys: Sequence[str]
) -> None:
  """Checks that settings contain all required keys.

  Args:
    path: path of the file, for messages.
    values: settings.
    keys: required keys.

  Raises:
    UserError: some are missing; the message lists them.
  """
  missing = [key for key in keys if key not in values]
  if missing:
    raise UserError(f'{path} lacks {", ".join(missing)}.')


def parse(path: str | os.PathLike, text: str) -> dict[str, Any]:
  """Parses a JSON object.

  Args:
    path: path of the file that contains the text, for messages.
    text: JSON.

  Raises:
    UserError: the text is not a JSON object.
  """
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not valid JSON: {error}.') from error
  if not isinstance(value, dict):
    raise UserError(f'{path} does not contain a JSON object.')
  return value


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the JSON object in a file; {} if the file does not exist.

  Args:
    path: path of the file, local or gs://.

  Raises:
    UserError: the file cannot be read, or is not a JSON object.
  """
  file = paths.locate(path)
  if not file.exists():
    return {}
  try:
    text = file.read_text()
  except (OSError, ValueError) as error:  # ValueError: not UTF-8
    raise UserError(f'{path} cannot be read: {error}.') from error
  return parse(path, text)
