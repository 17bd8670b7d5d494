"""Evaluation preprocessing of each family of projects, by name.

A preset consists of keyword arguments of `transforms.EvalTransform`, and of the
mean and standard deviation that pixels were normalized by. A config names a
preset, and may override single keys:

  config.preprocess = presets.section('mae', (224, 224), interpolation='area')

Configs and checkpoints therefore contain the keys and never the name. The
meaning of a name may be corrected later without changing any run.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vit_jax.errors import UserError, closest

Channels = tuple[float, ...]
# (mean, deviation) of each channel of pixels in [0, 1].
NONE = ((0.5,) * 3, (0.5,) * 3)  # what makes [-1, 1] of them
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Preset(NamedTuple):
  """What a family does with an image in evaluation.

  Attributes:
    resize: see `EvalTransform`.
    interpolation: see `resampling.resize`.
    normalization: mean and deviation of pixels in [0, 1].
    larger: (side of the result) → that of the resized image; pixels.
  """

  resize: str
  interpolation: str
  normalization: tuple[Channels, Channels]
  larger: Callable[[int], int]

  def section(self, image_size: tuple[int, ...]) -> dict[str, Any]:
    """Returns the keys of a config's `preprocess` for images of a size."""
    keys: dict[str, Any] = dict(
      resize=self.resize, interpolation=self.interpolation
    )
    if self.resize != 'squash':
      side = max(image_size)
      keys['central_fraction'] = side / self.larger(side)
    return keys


def share(of_larger: float) -> Callable[[int], int]:
  """Returns a function that computes the larger side from a result's side.

  It rounds as timm does.
  """
  return lambda side: math.floor(side / of_larger)


# vit: google-research/vision_transformer, `input_pipeline`: the whole image,
#   tf.image.resize without antialiasing.
# big_vision: resize_small, by area, and central_crop: 224 of 256, 384 of 448
#   (configs/transfer.py).
# timm: what its ViTs say, `vit_*` with crop_pct .9.
# dino: eval_knn.py and eval_linear.py: Resize(256, bicubic), CenterCrop(224).
# mae: util/datasets.py: the same; all of the smaller side above 224 pixels.
PRESETS = {
  'vit': Preset('squash', 'bilinear', NONE, share(1)),
  'big_vision': Preset(
    'central',
    'area',
    NONE,
    lambda side: 448 if side == 384 else round(side / 0.875),
  ),
  'timm': Preset('torchvision', 'bicubic', NONE, share(0.9)),
  'dino': Preset('torchvision', 'bicubic', IMAGENET, share(0.875)),
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
    UserError: there is no preset of that name.
  """
  if name not in PRESETS:
    raise UserError(
      f'{name!r} is no preset of preprocessing; {closest(name, PRESETS)}.'
    )
  return PRESETS[name]


# Training crops of a fine-tuning: the authors' public code's, and BiT's, which
# section 4.1 of the paper follows.
_FINE_TUNING: dict[str, dict[str, Any]] = {
  'inception': dict(crop='inception', min_area=0.05, flip=True),
  'bit': dict(crop='squash', enlarge=7 / 6, flip=True),
}


def fine_tuning_crop(name: str) -> dict[str, Any]:
  """Returns the keys of a config's `augment` for fine-tuning.

  Args:
    name: 'inception' or 'bit'.

  Raises:
    UserError: there is no crop of that name.
  """
  if name not in _FINE_TUNING:
    raise UserError(f'crop={name!r}; {closest(name, _FINE_TUNING)}.')
  return _FINE_TUNING[name]


def section(
  name: str, image_size: tuple[int, ...], **keys: Any
) -> dict[str, Any]:
  """Returns a config's `preprocess` section according to a preset.

  Args:
    name: name of a preset, a key of `PRESETS`.
    image_size: (height, width) of the result, pixels.
    **keys: keys of `EvalTransform` that override the preset's.

  Raises:
    UserError: there is no preset of that name.
  """
  return find(name).section(image_size) | keys
