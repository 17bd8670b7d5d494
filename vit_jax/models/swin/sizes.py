"""Sizes of Swin Transformers by variant (arXiv 2103.14030, section 3.3)."""

from typing import Any

from vit_jax.errors import UserError, closest

PATCH_SIZE = 4  # pixels, in all variants
MLP_RATIO = 4  # hidden units of an MLP per input channel
# Width and heads of the first stage. Each further stage has twice as many, so
# all heads have 32 channels.
SIZES = {
  'T': dict(width=96, depths=(2, 2, 6, 2), num_heads=3),
  'S': dict(width=96, depths=(2, 2, 18, 2), num_heads=3),
  'B': dict(width=128, depths=(2, 2, 18, 2), num_heads=4),
  'L': dict(width=192, depths=(2, 2, 18, 2), num_heads=6),
}
NAMES = ('width', 'depths', 'num_heads')


def of_variant(variant: str | None) -> dict[str, Any]:
  """Returns the sizes of a variant, or {} for None.

  Raises:
    UserError: the variant is unknown.
  """
  if variant is None:
    return {}
  if variant not in SIZES:
    raise UserError(f'model.variant is {variant!r}; {closest(variant, SIZES)}.')
  return SIZES[variant]
