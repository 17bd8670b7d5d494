"""Folds mean and standard deviation of pixels into a patch embedding.

The input of models of other projects is (u - mean) / std, where u in [0, 1] are
pixels; the input of models here is x = 2 u - 1. A patch embedding is linear and
has no padding, so that a change of its kernel and bias compensates the
difference, up to rounding.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.data.augment.presets import IMAGENET as IMAGENET  # for callers
from vit_jax.data.augment.presets import NONE as NONE
from vit_jax.errors import UserError
from vit_jax.models.contract import Statistics, is_symmetric

KERNEL, BIAS = 'embedding/kernel', 'embedding/bias'
CLIP = (
  (0.48145466, 0.4578275, 0.40821073),
  (0.26862954, 0.26130258, 0.27577711),
)


def fold(
  flat: dict[str, np.ndarray], mean: Sequence[float], std: Sequence[float]
) -> dict[str, np.ndarray]:
  """Returns parameters for x, given those for (u - mean) / std.

  Args:
    flat: parameters by path, including the kernel `[p, p, c, d]` and the bias
      `[d]` of the patch embedding.
    mean: mean of each channel of u.
    std: standard deviation of each channel of u.
  """
  return _scaled(flat, mean, std, inverse=False)


def unfold(
  flat: dict[str, np.ndarray], mean: Sequence[float], std: Sequence[float]
) -> dict[str, np.ndarray]:
  """Returns parameters for (u - mean) / std, given those for x; see `fold`."""
  return _scaled(flat, mean, std, inverse=True)


def symmetric(
  flat: dict[str, np.ndarray], statistics: Statistics
) -> dict[str, np.ndarray]:
  """Returns parameters for x, given those of a model with this normalization.

  Args:
    flat: parameters by path, see `fold`.
    statistics: mean and std of the model, see `models.contract.Model`.

  Raises:
    UserError: the first layer is not a patch embedding.
  """
  return fold(flat, *statistics)


def _scaled(
  flat: dict[str, np.ndarray],
  mean: Sequence[float],
  std: Sequence[float],
  inverse: bool,
) -> dict[str, np.ndarray]:
  """Folds x · slope + shift = (u - mean) / std into the patch embedding.

  Pixels are u in [0, 1], and x in [-1, 1]. With `inverse`, the same linear map
  is unfolded.
  """
  if is_symmetric((tuple(mean), tuple(std))):
    return flat  # (u - mean) / std is x; rounding must not change a parameter
  if KERNEL not in flat or flat[KERNEL].shape[-2] != len(mean):
    raise UserError(
      f'pixels are normalized by mean {tuple(mean)} and std {tuple(std)}. This '
      'can be converted only in a patch embedding: a convolution that overlaps '
      'the border is padded with zeros, which mean another value in other '
      'units. Keep model.mean and model.std, or use a model without a stem.'
    )
  slope = 0.5 / np.asarray(std, np.float64)
  shift = (0.5 - np.asarray(mean, np.float64)) / np.asarray(std, np.float64)
  if inverse:
    slope, shift = 1 / slope, -shift / slope
  # In float64, so that only the result is rounded to float32.
  kernel = np.asarray(flat[KERNEL], np.float64)
  bias = flat[BIAS] + np.einsum('yxcd,c->d', kernel, shift)
  kernel = kernel * slope[:, None]
  return flat | {
    KERNEL: kernel.astype(np.float32),
    BIAS: bias.astype(np.float32),
  }
