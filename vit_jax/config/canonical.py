"""One spelling for config values that mean the same, to compare runs by."""

import contextlib
import math
from typing import Any

from vit_jax.config import durations
from vit_jax.errors import UserError


def one(key: str, value: Any) -> Any:
  """Equal for all values of a flat key that mean the same.

  '1 epoch' is '1 epochs', an `image_size` of 16 is (16, 16), and NaN is NaN.
  """
  if key == 'image_size' and isinstance(value, list) and len(value) == 1:
    return value * 2
  if isinstance(value, float) and math.isnan(value):
    return 'nan'  # unlike NaN it equals itself
  if isinstance(value, str):
    with contextlib.suppress(UserError):
      number, unit = durations.parse(value)
      return f'{number:.17g} {unit}'
  return value
