"""Units of the pixels that a patch embedding receives (`model.pixels`)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.data.augment import presets

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
# (mean, std) of each channel of pixels in [0, 1]
STATISTICS: dict[str, Statistics] = {
  'symmetric': presets.NONE,
  'imagenet': presets.IMAGENET,
}


def scaled(
  images: Float[Array, 'n y x c'], statistics: Statistics
) -> Float[Array, 'n y x c']:
  """Returns images in the units of a patch embedding.

  Args:
    images: images in [-1, 1].
    statistics: mean and std of each channel of pixels in [0, 1], by which the
      images are normalized.
  """
  if is_symmetric(statistics):
    return images
  mean, std = (np.asarray(each, np.float32) for each in statistics)
  # Computed in float32; only the embedding rounds the result to bfloat16.
  return ((images.astype(jnp.float32) + 1) / 2 - mean) / std


def symmetric(channels: int) -> Statistics:
  """Returns the statistics that leave pixels in [-1, 1] unchanged."""
  return (0.5,) * channels, (0.5,) * channels


def is_symmetric(statistics: Statistics) -> bool:
  """Returns whether the statistics leave pixels in [-1, 1] unchanged."""
  return all(value == 0.5 for part in statistics for value in part)
