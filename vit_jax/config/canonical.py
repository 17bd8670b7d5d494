"""Converts config values that mean the same to one form, to compare runs."""

import contextlib
import math
from typing import Any

from vit_jax.config import durations
from vit_jax.errors import UserError


def canonical_value(key: str, value: Any) -> Any:
  """Returns the same result for all values of a key that mean the same.

  '1 epoch' becomes '1 epochs', an `image_size` of 16 becomes (16, 16), and NaN
  becomes 'nan'.

  Args:
    key: flat key, such as 'schedule.warmup'.
    value: value of the key, with tuples as lists.
  """
  if key == 'image_size' and isinstance(value, list) and len(value) == 1:
    return value * 2
  if isinstance(value, float) and math.isnan(value):
    return 'nan'  # NaN does not equal itself
  if isinstance(value, str):
    with contextlib.suppress(UserError):
      number, unit = durations.parse(value)
      return f'{number:.17g} {unit}'
  return value
