"""Units of the pixels that a patch embedding receives (`model.pixels`)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.data.augment import presets

# (mean, std) of each channel of pixels in [0, 1]
STATISTICS = {'symmetric': presets.NONE, 'imagenet': presets.IMAGENET}


def scaled(
  images: Float[Array, 'n y x c'], pixels: str
) -> Float[Array, 'n y x c']:
  """Returns images in the units of a patch embedding.

  Args:
    images: images in [-1, 1].
    pixels: key of `STATISTICS`.
  """
  if pixels == 'symmetric':
    return images
  mean, std = (np.asarray(each, np.float32) for each in STATISTICS[pixels])
  # Computed in float32; only the embedding rounds the result to bfloat16.
  return ((images.astype(jnp.float32) + 1) / 2 - mean) / std
