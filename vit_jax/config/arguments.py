"""Parses arguments of a config file: --config=FILE.py:key=value,key=value."""

import re
import types
from typing import Any

from vit_jax.errors import UserError, closest

_BOOLEANS = {'true': True, '1': True, 'false': False, '0': False}


def parse_arg(arg: str | None, **defaults: Any) -> types.SimpleNamespace:
  """Parses the argument of a config file, such as 'key=value,key=value'.

  A value may contain commas: a comma separates two arguments only if `key=`, a
  known key, another comma or the end of the text follows.

  Args:
    arg: text after the colon, or None.
    **defaults: allowed keys with their defaults, which determine the types.

  Raises:
    UserError: a key is unknown, or a value has another type.
  """
  values = dict(defaults)
  comma = rf',(?=\w+=|(?:{"|".join(map(re.escape, defaults))})?(?:,|$))'
  for part in filter(None, re.split(comma, arg or '')):
    key, equals, text = part.partition('=')
    if key not in defaults or not equals:
      raise UserError(
        f'config argument {part!r} is not key=value with a known key; '
        f'{closest(key, defaults)}.'
      )
    kind = type(defaults[key])
    convert = _BOOLEANS.__getitem__ if kind is bool else kind
    try:
      values[key] = convert(text)
    except (ValueError, KeyError) as error:
      raise UserError(
        f'config argument {part!r} must be of type {kind.__name__}.'
      ) from error
  return types.SimpleNamespace(**values)
