"""Random augmentation: RandAugment, 3-Augment and colour jitter."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import UInt8

from vit_jax.data.augment import ops

Image = UInt8[np.ndarray, 'y x 3']
# A function of image, level (magnitude / 10; 0 to 1, or 0 to 3 in the authors'
# policy) and random generator.
Op = Callable[[Image, float, np.random.Generator], Image]

_MAX_LEVEL = 10.0
_LEVEL_NOISE = 0.5  # standard deviation of timm's magnitudes
_AUTHORS_SIDE = 224  # image size of the authors' RandAugment code, pixels
_IMAGENET_MEAN = (124, 116, 104)  # RGB fill colour of timm's policy
_JITTER = (ops.brightness, ops.contrast, ops.color)


def _sign(rng: np.random.Generator) -> int:
  return 1 if rng.random() < 0.5 else -1


def _plain(op: Callable[[Image], Image]) -> Op:
  return lambda image, level, rng: op(image)


def _signed(op: Callable[[Image, float], Image], largest: float) -> Op:
  """Returns an operation with the argument ± level · `largest`."""
  return lambda image, level, rng: op(image, _sign(rng) * level * largest)


def _relative(
  op: Callable[[Image, float], Image], axis: int, largest: float
) -> Op:
  """Returns an operation with the argument ± level · `largest` · side."""
  return lambda image, level, rng: op(
    image, _sign(rng) * level * largest * image.shape[axis]
  )


def _around_one(op: Callable[[Image, float], Image]) -> Op:
  """Returns an operation with the factor 1 ± .9 · level, at least .1."""
  return lambda image, level, rng: op(
    image, max(0.1, 1 + _sign(rng) * 0.9 * level)
  )


def _rising(op: Callable[[Image, float], Image]) -> Op:
  """Returns an operation with the factor .1 + 1.8 · level."""
  return lambda image, level, rng: op(image, 0.1 + 1.8 * level)


def _cut_out(image: Image, level: float, rng: np.random.Generator) -> Image:
  y, x = rng.integers(image.shape[0]), rng.integers(image.shape[1])
  radius = 40 * level * min(image.shape[:2]) / _AUTHORS_SIDE
  return ops.cut_out(image, int(y), int(x), int(radius))


_COLOURS: dict[str, Op] = {
  'auto_contrast': _plain(ops.auto_contrast),
  'equalize': _plain(ops.equalize),
  'invert': _plain(ops.invert),
  'solarize_add': lambda image, level, rng: ops.solarize_add(
    image, int(110 * level)
  ),
}


def _geometry(shift_x: float, shift_y: float, **options: Any) -> dict[str, Op]:
  """Returns the geometric operations.

  Args:
    shift_x: largest translation, fraction of the width.
    shift_y: largest translation, fraction of the height.
    **options: keyword arguments of `ops.affine`.
  """

  def with_options(op: Callable[..., Image]) -> Callable[[Image, float], Image]:
    return functools.partial(op, **options)

  return {
    'rotate': _signed(with_options(ops.rotate), 30.0),  # degrees
    'shear_x': _signed(with_options(ops.shear_x), 0.3),
    'shear_y': _signed(with_options(ops.shear_y), 0.3),
    'translate_x': _relative(with_options(ops.translate_x), 1, shift_x),
    'translate_y': _relative(with_options(ops.translate_y), 0, shift_y),
  }


_ENHANCE = {
  'color': ops.color,
  'contrast': ops.contrast,
  'brightness': ops.brightness,
  'sharpness': ops.sharpness,
}
# 15 operations, which all become stronger with the magnitude. This is timm's
# policy `rand-mM-mstd0.5-inc1` with bicubic interpolation and ImageNet's mean
# as fill colour, used by DeiT, DeiT-III, Swin and the fine-tuning of MAE.
TIMM: dict[str, Op] = {
  **_COLOURS,
  **_geometry(0.45, 0.45, bicubic=True, fill=_IMAGENET_MEAN),
  **{name: _around_one(op) for name, op in _ENHANCE.items()},
  'posterize': lambda image, level, rng: ops.posterize(
    image, 4 - int(4 * level)
  ),
  'solarize': lambda image, level, rng: ops.solarize(
    image, 256 - int(256 * level)
  ),
}
# 16 operations of the RandAugment authors' code. As in that code, higher
# magnitudes make posterize and solarize weaker, and enhancement factors rise
# from below 1 to above 1. Difference: that code translates by up to 100 pixels
# and cuts out up to 80 at every image size, so that images of 32 pixels often
# become entirely grey. Here both are proportional to the image size and equal
# to the authors' values at 224 pixels.
AUTHORS: dict[str, Op] = {
  **_COLOURS,
  **_geometry(100 / _AUTHORS_SIDE, 100 / _AUTHORS_SIDE),
  **{name: _rising(op) for name, op in _ENHANCE.items()},
  'posterize': lambda image, level, rng: ops.posterize(
    image, min(8, int(4 * level))
  ),
  'solarize': lambda image, level, rng: ops.solarize(
    image, min(256, int(256 * level))
  ),
  'cut_out': _cut_out,
}


@dataclasses.dataclass(frozen=True)
class RandAugment:
  """Applies several random operations at the same magnitude.

  Attributes:
    layers: number of operations per image, drawn with replacement (N in the
      paper).
    magnitude: strength of the operations (M in the paper), 0 to 10, or 0 to 30
      with the authors' policy; `TIMM` and `AUTHORS` define its meaning. With
      the authors' policy, posterize and solarize become weaker as the magnitude
      increases: solarize has no effect from 10 on, posterize from 20 on.
    policy: 'timm' or 'authors'. 'timm' applies each operation with probability
      .5 and adds noise of standard deviation .5 to the magnitude. 'authors'
      always applies each operation at exactly this magnitude.

  Differences from the authors' code: geometric operations interpolate
  bilinearly in place of taking the nearest pixel. Contrast blends with the mean
  grey; the authors' code blends with a constant that, by mistake, depends on
  the number of pixels. Translations and cut-outs are fractions of the image
  size in place of pixels.

  Reference: Cubuk et al., arXiv 1909.13719.
  """

  layers: int
  magnitude: float
  policy: str

  def __call__(self, image: Image, rng: np.random.Generator) -> Image:
    """Returns an augmented image of the same shape."""
    table = list(POLICIES[self.policy].values())
    for _ in range(self.layers):
      op, magnitude = table[rng.integers(len(table))], self.magnitude
      if self.policy == 'timm':
        magnitude = rng.normal(magnitude, _LEVEL_NOISE)
        if rng.random() < 0.5:
          continue
      largest = MAX_MAGNITUDE[self.policy]
      image = op(image, np.clip(magnitude, 0, largest) / _MAX_LEVEL, rng)
    return image


POLICIES: dict[str, Any] = {'timm': TIMM, 'authors': AUTHORS}
MAX_MAGNITUDE = {'timm': 10.0, 'authors': 30.0}


def three_augment(image: Image, rng: np.random.Generator) -> Image:
  """Applies one of greyscale, solarization and blur (σ of .1 to 2 pixels).

  Reference: Touvron et al., arXiv 2204.07118, section 3.2.
  """
  choice = rng.integers(3)
  if choice == 0:
    return ops.greyscale(image)
  if choice == 1:
    return ops.solarize(image)
  return ops.blur(image, rng.uniform(0.1, 2.0))


def jitter(
  image: Image, strengths: tuple[float, ...], rng: np.random.Generator
) -> Image:
  """Changes brightness, contrast, saturation and hue in random order.

  Args:
    image: the image.
    strengths: strengths of these operations, at least 0; without a fourth, the
      hue is not changed. The first three factors are uniform in 1 ± strength,
      with a lower limit of 0. The hue is rotated by up to ± strength of the
      full circle; this strength is at most 1/2.
    rng: random generator.

  Reference: torchvision's `ColorJitter`.
  """
  for index in rng.permutation(len(strengths)):
    strength = strengths[index]
    if index < len(_JITTER):
      factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
      image = _JITTER[index](image, factor)
    else:
      image = ops.hue(image, rng.uniform(-strength, strength))
  return image
