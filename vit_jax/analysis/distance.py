"""Attention distance: how far heads look, in pixels of the image."""

import numpy as np
from jaxtyping import Float

Grid = tuple[int, int]


def between(grid: Grid, patch_pixels: int) -> Float[np.ndarray, 'p p']:
  """Distances of the centres of all patches, in rows, in pixels."""
  rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
  return patch_pixels * np.hypot(
    rows[:, None] - rows, columns[:, None] - columns
  )


def of_heads(
  attention: Float[np.ndarray, 'n l h t t'], grid: Grid, patch_pixels: int
) -> Float[np.ndarray, 'n l h']:
  """Σ_j A_ij · distance(i, j), the mean over queries i, of every head.

  Tokens before those of patches (a class token) are left out, as queries and
  as keys. What a patch gives to them counts as no distance: rows are not
  renormalised; the paper does not say whether its authors did.

  Args:
    attention: weights by image, layer, head, query and key.
    grid: rows and columns of patches, whose tokens come last.
    patch_pixels: side of a patch.

  Reference: arXiv 2010.11929, section 4.5, Figures 7 (right) and 11.
  """
  distances = between(grid, patch_pixels)
  prefix = attention.shape[-1] - len(distances)
  patches = attention[..., prefix:, prefix:]
  total = np.einsum('nlhqk,qk->nlh', patches, distances, dtype=np.float64)
  return total / len(distances)
