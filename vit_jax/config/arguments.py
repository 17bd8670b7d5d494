"""A config file's own arguments: --config=FILE.py:key=value,key=value."""

import re
import types
from typing import Any

from vit_jax.errors import UserError, closest

_BOOLEANS = {'true': True, '1': True, 'false': False, '0': False}


def parse_arg(arg: str | None, **defaults: Any) -> types.SimpleNamespace:
  """Reads a config file's argument, `--config=file.py:key=value,key=value`.

  A comma separates where a key follows, or nothing; others are of the value.

  Args:
    arg: the text after the colon, or None.
    **defaults: allowed keys with their defaults, which give the types.

  Raises:
    UserError: unknown key or a value of another type.
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
