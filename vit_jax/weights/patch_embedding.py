"""Converts a patch embedding to images with another mean, std or channels.

The input of models of other projects is (u - mean) / std, where u in [0, 1] are
pixels; the input of models here is x = 2 u - 1. A patch embedding is linear and
has no padding, so that a change of its kernel and bias compensates the
difference, up to rounding.
"""

import numpy as np
from jaxtyping import Float

from vit_jax.arrays.pixels import IMAGENET, NONE
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Statistics, is_symmetric

KERNEL, BIAS = 'embedding/kernel', 'embedding/bias'
CLIP = (
  (0.48145466, 0.4578275, 0.40821073),
  (0.26862954, 0.26130258, 0.27577711),
)
RGB = 3  # channels of the images that most weights are for


def converted(
  flat: dict[str, np.ndarray], old: Statistics, new: Statistics = NONE
) -> dict[str, np.ndarray]:
  """Returns parameters for pixels that are normalized by another mean and std.

  Args:
    flat: parameters by path, including the kernel `[p, p, c, d]` and the bias
      `[d]` of the patch embedding.
    old: mean and std of each channel of pixels in [0, 1], for which the
      parameters are.
    new: mean and std for the result; by default those of pixels in [-1, 1].

  Raises:
    UserError: the first layer is not a patch embedding.
  """
  return _scaled(_scaled(flat, old, inverse=False), new, inverse=True)


def _scaled(
  flat: dict[str, np.ndarray], statistics: Statistics, inverse: bool
) -> dict[str, np.ndarray]:
  """Folds the map from x in [-1, 1] to (u - mean) / std into parameters.

  With u = (x + 1) / 2, this map is x · slope + shift, where slope = 0.5 / std
  and shift = (0.5 - mean) / std. The kernel W and the bias b of the result give
  the same for x as the given ones give for (u - mean) / std:
  W · (x · slope + shift) + b = (W · slope) · x + (b + W · shift).

  Args:
    flat: see `converted`.
    statistics: mean and std.
    inverse: whether the inverse map is folded into the parameters.
  """
  mean, std = (tuple(values) for values in statistics)
  if is_symmetric((mean, std)):  # the map is the identity
    return flat  # bit for bit: rounding must not change a parameter
  if KERNEL not in flat or flat[KERNEL].shape[-2] != len(mean):
    raise UserError(
      f'pixels normalized by mean {mean} and std {std} can be converted only '
      'in a patch embedding: keep model.mean and model.std.'
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


def is_own(statistics: Statistics) -> bool:
  """Returns whether a model normalizes images by their own mean and std."""
  mean, std = (tuple(values) for values in statistics)
  return not is_symmetric((mean, std)) and (mean, std) != IMAGENET


def statistics_for(before: Model, after: Model) -> Statistics:
  """Returns the mean and std to which a patch embedding is converted.

  The function of an image stays the same, with an exception: weights for
  photographs are used for images with a mean and std of their own as if these
  were photographs that are normalized by the mean and std of ImageNet. Both
  inputs then have the mean 0 and the standard deviation 1. The same holds for
  images with another number of channels.

  Args:
    before: model that the parameters are from.
    after: model that they are converted for.
  """
  old, new = before.normalization, after.normalization
  if is_own(new) and not is_own(old):
    return IMAGENET
  if after.channels == before.channels:
    return new
  # `new` is for other channels than the kernel, which `repeated` changes later.
  # The kernel stays as it is if both inputs have the mean 0 and the standard
  # deviation 1; otherwise it is converted to pixels in [-1, 1].
  return old if is_own(new) else NONE


def repeated(
  kernel: Float[np.ndarray, 'y x 3 d'], channels: int
) -> Float[np.ndarray, 'y x c d']:
  """Adapts a kernel for RGB to other channels, as timm's `adapt_input_conv`.

  One channel gets the sum of the three. More channels get the three in turn,
  scaled so that the sum over all channels stays about the same.
  """
  if channels == 1:
    return kernel.sum(axis=2, keepdims=True)
  kernel = kernel[:, :, np.arange(channels) % RGB] * (RGB / channels)
  return kernel.astype(np.float32)
