"""Presets of evaluation preprocessing, one for each family of projects.

A preset consists of keyword arguments of `transforms.EvalTransform`, and of the
mean and standard deviation (std) by which pixels are normalized. A config can
use a preset and override single keys:

  config.preprocess = presets.section('mae', (224, 224), interpolation='area')

The config and its checkpoints then contain the resulting keys, not the name of
the preset. A preset can therefore be corrected later without changing the
preprocessing of existing runs.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vit_jax.arrays.pixels import IMAGENET, NONE, Channels
from vit_jax.errors import check_choice


class Preset(NamedTuple):
  """Evaluation preprocessing of a family of projects.

  Attributes:
    resize: see `EvalTransform`.
    interpolation: see `decode.resize`.
    normalization: mean and std of pixels in [0, 1].
    resized_side: function from the side of the result, which is cut out of the
      centre, to the side of the resized image, pixels.
  """

  resize: str
  interpolation: str
  normalization: tuple[Channels, Channels]
  resized_side: Callable[[int], int]

  def section(self, image_size: tuple[int, ...]) -> dict[str, Any]:
    """Returns the section `preprocess` for inputs of (height, width) pixels."""
    keys: dict[str, Any] = dict(
      resize=self.resize, interpolation=self.interpolation
    )
    if self.resize != 'squash':
      side = max(image_size)
      keys['central_fraction'] = side / self.resized_side(side)
    return keys


def cropped(fraction: float) -> Callable[[int], int]:
  """Returns a function from the side of a crop to that of the resized image.

  The side of the resized image is rounded down, as in timm.

  Args:
    fraction: ratio of the crop's side to the resized image's side.
  """
  return lambda side: math.floor(side / fraction)


# vit: `input_pipeline` of google-research/vision_transformer, which resizes the
#   whole image by tf.image.resize without antialiasing, and cuts out nothing.
# big_vision: resize_small by area, then central_crop of 224 of 256 or 384 of
#   448 pixels (configs/transfer.py).
# timm: the default config of its models `vit_*`, crop_pct .9.
# dino: Resize(256, bicubic) and CenterCrop(224) in eval_knn.py, eval_linear.py.
# mae: the same as dino (util/datasets.py), but if the image size is above 224
#   pixels, the shorter side is not cropped.
PRESETS = {
  'vit': Preset('squash', 'bilinear', NONE, cropped(1)),
  'big_vision': Preset(
    'central',
    'area',
    NONE,
    lambda side: 448 if side == 384 else round(side / 0.875),
  ),
  'timm': Preset('torchvision', 'bicubic', NONE, cropped(0.9)),
  'dino': Preset('torchvision', 'bicubic', IMAGENET, cropped(0.875)),
  'mae': Preset(
    'torchvision',
    'bicubic',
    IMAGENET,
    lambda side: side if side > 224 else math.floor(side / 0.875),
  ),
}


def find(name: str) -> Preset:
  """Returns a preset by its name.

  Raises:
    UserError: a preset of that name does not exist.
  """
  check_choice('the preset of preprocessing', name, PRESETS)
  return PRESETS[name]


# Training crops for fine-tuning: 'inception' as in the authors' public code,
# 'bit' as in BiT, which the ViT paper follows (section 4.1).
_FINE_TUNING: dict[str, dict[str, Any]] = {
  'inception': dict(crop='inception', min_area=0.05, flip=True),
  'bit': dict(crop='squash', enlarge=7 / 6, flip=True),
}


def fine_tuning_crop(name: str) -> dict[str, Any]:
  """Returns the keys of a config's `augment` for fine-tuning.

  Args:
    name: 'inception' or 'bit'.

  Raises:
    UserError: a crop of that name does not exist.
  """
  check_choice('crop', name, _FINE_TUNING)
  return _FINE_TUNING[name]


def section(
  name: str, image_size: tuple[int, ...], **keys: Any
) -> dict[str, Any]:
  """Returns a config's `preprocess` section according to a preset.

  Args:
    name: name of a preset, a key of `PRESETS`.
    image_size: (height, width) of the result, pixels.
    **keys: arguments of `EvalTransform`, which override those of the preset.

  Raises:
    UserError: a preset of that name does not exist.
  """
  return find(name).section(image_size) | keys
