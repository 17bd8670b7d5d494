"""Attention rollout and mean attention distance, from attention weights."""

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageFilter

Grid = tuple[int, int]


def rollout(
  attention: Float[np.ndarray, 'n l h t t'], residual: bool = True
) -> Float[np.ndarray, 'n t t']:
  """Multiplies the attention of all layers, the last layer on the left.

  Args:
    attention: weights by image, layer, head, query and key; rows sum to 1.
    residual: whether to add the identity, which represents the residual
      connections, to each layer's mean over heads, and to renormalize.

  Returns:
    Weights by image, token after the last layer and input token; rows sum to 1.

  Reference: arXiv 2010.11929, appendix D.8 (Figures 6 and 14), after arXiv
  2005.00928. The paper does not mention the identity; its authors do.
  """
  layers = attention.mean(axis=2, dtype=np.float64)  # [n, l, t, t]
  if residual:
    layers = layers + np.eye(layers.shape[-1])
  layers = layers / layers.sum(axis=-1, keepdims=True)
  rolled = layers[:, 0]
  for index in range(1, layers.shape[1]):
    rolled = layers[:, index] @ rolled
  return rolled


def on_patches(
  weights: Float[np.ndarray, '*n t t'], grid: Grid, by_token: bool
) -> Float[np.ndarray, '*n r c']:
  """Returns the attention to the patches, of the class token or on average.

  Args:
    weights: weights by query and key; the tokens of patches come last, row by
      row.
    grid: rows and columns of patches.
    by_token: whether the query is the first token (a class token); otherwise,
      the mean over the queries of all patches is returned.
  """
  prefix = weights.shape[-1] - grid[0] * grid[1]
  queries = weights[..., :1, :] if by_token else weights[..., prefix:, :]
  patches = queries.mean(axis=-2)[..., prefix:]
  return patches.reshape(*patches.shape[:-1], *grid)


def image_mask(
  weights: Float[np.ndarray, 'r c'], size: Grid
) -> Float[np.ndarray, 'y x']:
  """Resizes a map of patches to a smooth mask of the image, from 0 to 1.

  The map is divided by its maximum, resized by Lanczos, blurred by a Gaussian
  whose σ is the size of a patch along each axis, and stretched to [0, 1]. A
  constant map gives ones.

  Args:
    weights: weights of the patches, at least 0.
    size: (height, width) of the image in pixels.

  Reference: google-research/vision_transformer, issue 27, where the authors
  describe how they drew Figure 6.
  """
  height, width = size
  scaled = weights / max(float(weights.max()), 1e-30)
  picture = Image.fromarray((255 * scaled).astype(np.float32))
  picture = picture.resize((width, height), Image.Resampling.LANCZOS)
  pixels = np.clip(np.asarray(picture), 0, 255).astype(np.uint8)
  rows, columns = weights.shape
  blur = ImageFilter.GaussianBlur((width / columns, height / rows))
  smooth = np.asarray(Image.fromarray(pixels).filter(blur), np.float64)
  low, high = smooth.min(), smooth.max()
  if high == low:
    return np.ones(size)
  return (smooth - low) / (high - low)


def patch_distances(grid: Grid, patch_pixels: int) -> Float[np.ndarray, 'p p']:
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


def head_distances(
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
  distances = patch_distances(grid, patch_pixels)
  prefix = attention.shape[-1] - len(distances)
  patches = attention[..., prefix:, prefix:]
  total = np.einsum('nlhqk,qk->nlh', patches, distances, dtype=np.float64)
  return total / len(distances)
