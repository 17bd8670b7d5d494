"""Sizes of Vision Transformers by variant name, as in the papers' tables."""

from typing import Any

from vit_jax.errors import UserError

# B, L, H: Table 1. Ti, S: DeiT (arXiv 2012.12877) and its successors. g:
# "Scaling Vision Transformers" (arXiv 2106.04560), Table 2.
SIZES = {
  'Ti': dict(width=192, depth=12, mlp_dim=768, num_heads=3),
  'S': dict(width=384, depth=12, mlp_dim=1536, num_heads=6),
  'B': dict(width=768, depth=12, mlp_dim=3072, num_heads=12),
  'L': dict(width=1024, depth=24, mlp_dim=4096, num_heads=16),
  'H': dict(width=1280, depth=32, mlp_dim=5120, num_heads=16),
  'g': dict(width=1408, depth=40, mlp_dim=6144, num_heads=16),
}
PATCH_SIZES = (8, 14, 16, 32)
# Hybrids, by the parts of the name before "+" and after "/": units of each
# stage of the stem, and side of a patch on its map. As in the official code,
# R+Ti/16 has patches of 8x8 on a map of stride 4, which makes 32 pixels.
STEMS = {
  ('R50', '16'): ((3, 4, 9), 1),
  ('R50', '32'): ((3, 4, 6, 3), 1),
  ('R26', '32'): ((2, 2, 2, 2), 1),
  ('R', '16'): ((), 8),
}
NAMES = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')


def of_variant(variant: str | None) -> dict[str, int]:
  """Returns the sizes of a variant such as 'L/16', or {} for None.

  The patch size of a hybrid such as 'R50+B/16' refers to the stem's map.

  Raises:
    UserError: the variant is unknown.
  """
  if variant is None:
    return {}
  stem, size, patch = _parts(variant)
  known = (stem, patch) in STEMS if stem else patch in map(str, PATCH_SIZES)
  if size not in SIZES or not known:
    hybrids = ', '.join(f'{stem}+…/{patch}' for stem, patch in STEMS)
    raise UserError(
      f'model.variant is {variant!r}; allowed: one of {"|".join(SIZES)}, a '
      f'slash and one of {"|".join(map(str, PATCH_SIZES))}, such as L/16; or '
      f'a hybrid, {hybrids}, such as R50+B/16.'
    )
  side = STEMS[stem, patch][1] if stem else int(patch)
  return dict(patch_size=side, **SIZES[size])


def stem_of(variant: str | None) -> dict[str, Any] | None:
  """Returns the config section of a variant's stem; None without a stem.

  Args:
    variant: name of a variant, or None.
  """
  stem, _, patch = _parts(variant or '')
  if (stem, patch) not in STEMS:
    return None
  return dict(name='resnet', depths=STEMS[stem, patch][0])


def _parts(variant: str) -> tuple[str, str, str]:
  """Splits 'R50+B/16' into ('R50', 'B', '16'); 'R50' is '' without a stem."""
  body, _, patch = variant.partition('/')
  stem, _, size = body.rpartition('+')
  return stem, size, patch
