"""Sizes of Swin Transformers by name (arXiv 2103.14030, section 3.3)."""

from typing import Any

from vit_jax.errors import UserError, closest

PATCH_SIZE = 4  # pixels, in all variants
MLP_RATIO = 4  # hidden units of an MLP for each of its inputs
# Of the first stage; each stage has twice the width and heads of the one before
# it, so that all heads have 32 channels.
SIZES = {
  'T': dict(width=96, depths=(2, 2, 6, 2), num_heads=3),
  'S': dict(width=96, depths=(2, 2, 18, 2), num_heads=3),
  'B': dict(width=128, depths=(2, 2, 18, 2), num_heads=4),
  'L': dict(width=192, depths=(2, 2, 18, 2), num_heads=6),
}
NAMES = ('width', 'depths', 'num_heads')


def of(variant: str | None, explicit: tuple[Any, ...]) -> dict[str, Any]:
  """The sizes of a variant, and those given explicitly in their place.

  Args:
    variant: of `SIZES`; None if all sizes are given.
    explicit: in the order of `NAMES`; None where the variant decides.

  Raises:
    UserError: unknown variant.
  """
  if variant is not None and variant not in SIZES:
    raise UserError(
      f'no Swin is called {variant!r}; {closest(variant, SIZES)}.'
    )
  given = dict(zip(NAMES, explicit, strict=True))
  chosen = {name: size for name, size in given.items() if size is not None}
  return ({} if variant is None else SIZES[variant]) | chosen
