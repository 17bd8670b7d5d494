"""Attention rollout: how much of each patch reaches what is read out."""

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageFilter

Grid = tuple[int, int]


def rollout(
  attention: Float[np.ndarray, 'n l h t t'], residual: bool = True
) -> Float[np.ndarray, 'n t t']:
  """The product of all layers' attention, the last layer's on the left.

  Args:
    attention: weights by image, layer, head, query and key; rows sum to 1.
    residual: each layer's mean over heads plus the identity, renormalised,
      which stands for the residual connections; else the mean alone.

  Returns:
    By image, token after the last layer, token before the first; rows sum to 1.

  Reference: arXiv 2010.11929, appendix D.8 (Figures 6 and 14), after arXiv
  2005.00928; the paper does not mention the identity, its authors do.
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
  """What the read-out token, or the mean of all patches, takes of each patch.

  Args:
    weights: by query and key; tokens of patches come last, in rows.
    grid: rows and columns of patches.
    by_token: whether the first token is read out (a class token); else the
      patches are, and the mean over their queries is taken.
  """
  prefix = weights.shape[-1] - grid[0] * grid[1]
  queries = weights[..., :1, :] if by_token else weights[..., prefix:, :]
  seen = queries.mean(axis=-2)[..., prefix:]
  return seen.reshape(*seen.shape[:-1], *grid)


def mask(
  weights: Float[np.ndarray, 'r c'], size: Grid
) -> Float[np.ndarray, 'y x']:
  """A map of patches as a smooth mask of an image, from 0 to 1.

  Divided by its maximum, resized by Lanczos, blurred by a Gaussian whose σ is
  the side of a patch, and stretched to [0, 1]; where all is equal, ones.

  Args:
    weights: of patches, at least 0.
    size: (height, width) of the image, pixels.

  Reference: google-research/vision_transformer, issue 27: how the authors drew
  Figure 6.
  """
  height, width = size
  scaled = weights / max(float(weights.max()), 1e-30)
  picture = Image.fromarray((255 * scaled).astype(np.float32))
  picture = picture.resize((width, height), Image.Resampling.LANCZOS)
  pixels = np.clip(np.asarray(picture), 0, 255).astype(np.uint8)
  blur = ImageFilter.GaussianBlur(height / weights.shape[0])
  smooth = np.asarray(Image.fromarray(pixels).filter(blur), np.float64)
  low, high = smooth.min(), smooth.max()
  if high == low:
    return np.ones(size)
  return (smooth - low) / (high - low)
