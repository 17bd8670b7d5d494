"""Sizes of ResNets by name."""

import re
from typing import Any

from vit_jax.errors import UserError

# Units in each stage ("Deep Residual Learning", arXiv 1512.03385, Table 1).
DEPTHS = {
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),  # "Identity Mappings", arXiv 1603.05027, appendix
}
WIDTH = 64  # channels inside the first stage's units at width factor 1


def of_variant(variant: str | None) -> dict[str, Any]:
  """`depths` and `width_factor` of a name such as 'R50x1'; none for None.

  Raises:
    UserError: unknown name.
  """
  if variant is None:
    return {}
  match = re.fullmatch(r'R(\d+)x([1-4])', variant)
  if match is None or int(match[1]) not in DEPTHS:
    raise UserError(
      f'no ResNet is called {variant!r}; allowed: one of '
      f'{"|".join(f"R{depth}" for depth in DEPTHS)}, x and a width of 1 to 4, '
      'such as R50x1.'
    )
  return dict(depths=DEPTHS[int(match[1])], width_factor=int(match[2]))
