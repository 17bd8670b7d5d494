"""Mean and deviation of pixels, folded into a patch embedding and out of it.

Other projects give their models (u - mean) / std, where u in [0, 1] are pixels;
ours get x = 2 u - 1. A patch embedding is linear and pads nothing, so another
kernel and bias make up for the difference exactly, but for rounding.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.data.augment.presets import IMAGENET as IMAGENET  # for callers
from vit_jax.data.augment.presets import NONE as NONE

KERNEL, BIAS = 'embedding/kernel', 'embedding/bias'
CLIP = (
  (0.48145466, 0.4578275, 0.40821073),
  (0.26862954, 0.26130258, 0.27577711),
)


def fold(
  flat: dict[str, np.ndarray], mean: Sequence[float], std: Sequence[float]
) -> dict[str, np.ndarray]:
  """Parameters for x, from those for (u - mean) / std.

  Args:
    flat: {path: array}, a kernel `[p, p, c, d]` and its bias `[d]` among them.
    mean: of each channel of u.
    std: its deviation.
  """
  return _scaled(flat, mean, std, inverse=False)


def unfold(
  flat: dict[str, np.ndarray], mean: Sequence[float], std: Sequence[float]
) -> dict[str, np.ndarray]:
  """Parameters for (u - mean) / std, from those for x."""
  return _scaled(flat, mean, std, inverse=True)


def _scaled(
  flat: dict[str, np.ndarray],
  mean: Sequence[float],
  std: Sequence[float],
  inverse: bool,
) -> dict[str, np.ndarray]:
  """(u - mean) / std is x · slope + shift, with a slope for each channel."""
  if (tuple(mean), tuple(std)) == NONE:
    return flat  # nothing to fold: bit for bit
  slope = 0.5 / np.asarray(std, np.float64)
  shift = (0.5 - np.asarray(mean, np.float64)) / np.asarray(std, np.float64)
  if inverse:
    slope, shift = 1 / slope, -shift / slope
  kernel = np.asarray(flat[KERNEL], np.float64)
  bias = flat[BIAS] + np.einsum('yxcd,c->d', kernel, shift)
  kernel = kernel * slope[:, None]
  return flat | {
    KERNEL: kernel.astype(np.float32),
    BIAS: bias.astype(np.float32),
  }
