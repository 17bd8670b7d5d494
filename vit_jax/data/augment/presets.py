"""How the weights of each family of projects are evaluated, by name.

A preset is keyword arguments of `transforms.EvalTransform`, and the mean and
deviation that pixels were normalised by. A config names one, and what it says
besides stands above it:

  config.preprocess = presets.section('mae', (224, 224), interpolation='area')

So configs and checkpoints hold the keys themselves and never the name: what a
name stands for may be mended later, and no run changes.
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
    """The keys of a config's `preprocess` for a size of (height, width)."""
    keys: dict[str, Any] = dict(
      resize=self.resize, interpolation=self.interpolation
    )
    if self.resize != 'squash':
      side = max(image_size)
      keys['central_fraction'] = side / self.larger(side)
    return keys


def share(of_larger: float) -> Callable[[int], int]:
  """The larger side of which a result is some share, as timm rounds it."""
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
    *('central', 'area', NONE),
    lambda side: 448 if side == 384 else round(side / 0.875),
  ),
  'timm': Preset('torchvision', 'bicubic', NONE, share(0.9)),
  'dino': Preset('torchvision', 'bicubic', IMAGENET, share(0.875)),
  'mae': Preset(
    *('torchvision', 'bicubic', IMAGENET),
    lambda side: side if side > 224 else math.floor(side / 0.875),
  ),
}


def find(name: str) -> Preset:
  """A preset by its name.

  Raises:
    UserError: there is none of that name.
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
  """A config's `preprocess` by a preset.

  Args:
    name: of `PRESETS`.
    image_size: (height, width) of the result, pixels.
    **keys: of `EvalTransform`, which stand above the preset's.

  Raises:
    UserError: there is no preset of that name.
  """
  return find(name).section(image_size) | keys
