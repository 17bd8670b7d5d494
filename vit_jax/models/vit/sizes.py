"""Sizes of Vision Transformers by name, as their papers' tables give them."""

from typing import Any

from vit_jax.errors import UserError

# Table 1 (B, L, H); Ti and S: DeiT (arXiv 2012.12877) and its successors;
# g: "Scaling Vision Transformers" (arXiv 2106.04560), Table 2.
SIZES = {
  'Ti': dict(width=192, depth=12, mlp_dim=768, num_heads=3),
  'S': dict(width=384, depth=12, mlp_dim=1536, num_heads=6),
  'B': dict(width=768, depth=12, mlp_dim=3072, num_heads=12),
  'L': dict(width=1024, depth=24, mlp_dim=4096, num_heads=16),
  'H': dict(width=1280, depth=32, mlp_dim=5120, num_heads=16),
  'g': dict(width=1408, depth=40, mlp_dim=6144, num_heads=16),
}
PATCH_SIZES = (8, 14, 16, 32)
# Hybrids by what stands before "+" and after "/": units in each stage of the
# stem, and the patch's side on its map. The official code's; its R+Ti/16 has
# patches of 8x8 on a map of stride 4, which makes 32 pixels.
STEMS = {
  ('R50', '16'): ((3, 4, 9), 1),
  ('R50', '32'): ((3, 4, 6, 3), 1),
  ('R26', '32'): ((2, 2, 2, 2), 1),
  ('R', '16'): ((), 8),
}
NAMES = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')


def of_variant(variant: str | None) -> dict[str, int]:
  """The sizes that a name such as 'L/16' stands for; none for None.

  Of a hybrid's, such as 'R50+B/16', the patch is that of its stem's map.

  Raises:
    UserError: unknown name.
  """
  if variant is None:
    return {}
  stem, size, patch = _parts(variant)
  known = (stem, patch) in STEMS if stem else patch in map(str, PATCH_SIZES)
  if size not in SIZES or not known:
    hybrids = ', '.join(f'{stem}+…/{patch}' for stem, patch in STEMS)
    raise UserError(
      f'no model is called {variant!r}; allowed: one of {"|".join(SIZES)}, a '
      f'slash and one of {"|".join(map(str, PATCH_SIZES))}, such as L/16; or '
      f'a hybrid, {hybrids}, such as R50+B/16.'
    )
  side = STEMS[stem, patch][1] if stem else int(patch)
  return dict(patch_size=side, **SIZES[size])


def stem_of(variant: str | None) -> dict[str, Any] | None:
  """The section of the stem that a name stands for; None without one.

  Args:
    variant: see `of_variant`.
  """
  stem, _, patch = _parts(variant or '')
  if (stem, patch) not in STEMS:
    return None
  return dict(name='resnet', depths=STEMS[stem, patch][0])


def _parts(variant: str) -> tuple[str, str, str]:
  """('R50', 'B', '16') of 'R50+B/16'; the first is empty without a stem."""
  body, _, patch = variant.partition('/')
  stem, _, size = body.rpartition('+')
  return stem, size, patch


def of(variant: str | None, explicit: tuple[int | None, ...]) -> dict[str, int]:
  """The sizes of a variant, and those given explicitly in their place.

  Args:
    variant: see `of_variant`, also for what it raises.
    explicit: in the order of `NAMES`; None where the variant decides.
  """
  given = dict(zip(NAMES, explicit, strict=True))
  chosen = {name: size for name, size in given.items() if size is not None}
  return of_variant(variant) | chosen
