"""Mean attention distance of each head, in pixels of the image."""

import numpy as np
from jaxtyping import Float

Grid = tuple[int, int]


def between(grid: Grid, patch_pixels: int) -> Float[np.ndarray, 'p p']:
  """Returns the distances between the centres of all patches, in pixels.

  Patches are numbered row by row.

  Args:
    grid: rows and columns of patches.
    patch_pixels: side length of a patch, pixels.
  """
  rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
  return patch_pixels * np.hypot(
    rows[:, None] - rows, columns[:, None] - columns
  )


def of_heads(
  attention: Float[np.ndarray, 'n l h t t'], grid: Grid, patch_pixels: int
) -> Float[np.ndarray, 'n l h']:
  """Returns the mean over queries i of Σ_j A_ij · distance(i, j) per head.

  Tokens that precede the patch tokens (a class token) are ignored, both as
  queries and as keys. The rows are not renormalised afterwards, so attention to
  such tokens contributes a distance of 0. The paper does not state whether its
  authors renormalised.

  Args:
    attention: weights by image, layer, head, query and key.
    grid: rows and columns of patches, whose tokens come last.
    patch_pixels: side length of a patch, pixels.

  Reference: arXiv 2010.11929, section 4.5, Figures 7 (right) and 11.
  """
  distances = between(grid, patch_pixels)
  prefix = attention.shape[-1] - len(distances)
  patches = attention[..., prefix:, prefix:]
  total = np.einsum('nlhqk,qk->nlh', patches, distances, dtype=np.float64)
  return total / len(distances)
