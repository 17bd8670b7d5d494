"""Sizes of Vision Transformers by name, as their papers' tables give them."""

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
NAMES = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')


def of_variant(variant: str | None) -> dict[str, int]:
  """The sizes that a name such as 'L/16' stands for; none for None.

  Raises:
    UserError: unknown name.
  """
  if variant is None:
    return {}
  size, _, patch = variant.partition('/')
  if size not in SIZES or patch not in map(str, PATCH_SIZES):
    raise UserError(
      f'no model is called {variant!r}; allowed: one of {"|".join(SIZES)}, a '
      f'slash and one of {"|".join(map(str, PATCH_SIZES))}, such as L/16.'
    )
  return dict(patch_size=int(patch), **SIZES[size])


def of(variant: str | None, explicit: tuple[int | None, ...]) -> dict[str, int]:
  """The sizes of a variant, and those given explicitly in their place.

  Args:
    variant: see `of_variant`, also for what it raises.
    explicit: in the order of `NAMES`; None where the variant decides.
  """
  given = dict(zip(NAMES, explicit, strict=True))
  chosen = {name: size for name, size in given.items() if size is not None}
  return of_variant(variant) | chosen
