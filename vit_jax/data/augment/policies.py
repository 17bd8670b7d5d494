"""Random changes of training images: RandAugment, 3-Augment, colour jitter."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import UInt8

from vit_jax.data.augment import ops

Image = UInt8[np.ndarray, 'y x 3']
# An operation at a level of 0 to 1 (the authors' up to 3), with its own random
# draws.
Op = Callable[[Image, float, np.random.Generator], Image]

_MAX_LEVEL = 10.0
_LEVEL_NOISE = 0.5  # of timm's magnitudes, standard deviation
_AUTHORS_SIDE = 224  # pixels of the images that their code was written for
_IMAGENET_MEAN = (124, 116, 104)  # RGB, timm's colour for what is empty
_JITTER = (ops.brightness, ops.contrast, ops.color)


def _sign(rng: np.random.Generator) -> int:
  return 1 if rng.random() < 0.5 else -1


def _plain(op: Callable[[Image], Image]) -> Op:
  return lambda image, level, rng: op(image)


def _signed(op: Callable[[Image, float], Image], largest: float) -> Op:
  """Up to ±`largest`."""
  return lambda image, level, rng: op(image, _sign(rng) * level * largest)


def _relative(
  op: Callable[[Image, float], Image], axis: int, largest: float
) -> Op:
  """Up to ±`largest` of the image's length along an axis."""
  return lambda image, level, rng: op(
    image, _sign(rng) * level * largest * image.shape[axis]
  )


def _around_one(op: Callable[[Image, float], Image]) -> Op:
  """Returns an operation with a factor of 1 ± .9 at the highest level."""
  return lambda image, level, rng: op(
    image, max(0.1, 1 + _sign(rng) * 0.9 * level)
  )


def _rising(op: Callable[[Image, float], Image]) -> Op:
  """Returns an operation with a factor that rises from .1 to 1.9."""
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
  rotate, shear_x, shear_y, translate_x, translate_y = (
    functools.partial(op, **options)
    for op in (
      ops.rotate,
      ops.shear_x,
      ops.shear_y,
      ops.translate_x,
      ops.translate_y,
    )
  )
  return {
    'rotate': _signed(rotate, 30.0),  # degrees
    'shear_x': _signed(shear_x, 0.3),
    'shear_y': _signed(shear_y, 0.3),
    'translate_x': _relative(translate_x, 1, shift_x),
    'translate_y': _relative(translate_y, 0, shift_y),
  }


_ENHANCE = {
  'color': ops.color,
  'contrast': ops.contrast,
  'brightness': ops.brightness,
  'sharpness': ops.sharpness,
}
# 15 operations, all of them stronger at higher magnitudes: what timm calls
# `rand-mM-mstd0.5-inc1`, with bicubic geometry on ImageNet's mean colour. This
# is the policy of DeiT, DeiT-III, Swin and MAE's fine-tuning.
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
# 16 operations of the RandAugment authors' code. There higher magnitudes make
# posterize and solarize weaker and brighten rather than darken; that is theirs.
# Not theirs: they move by up to 100 pixels and cut out 80, whatever the size,
# and images of 32 pixels often end up all grey. Here both are shares of the
# size, equal to theirs at 224 pixels.
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
  """Applies random operations, all at one magnitude.

  Attributes:
    layers: operations for each image, drawn with replacement (N in the paper).
    magnitude: 0 to 10, with the authors' policy to 30, M in the paper; see the
      tables above for what it means. Beyond 10 their posterize and solarize
      change less and less, and nothing in the end.
    policy: 'timm' or 'authors'. timm's applies each operation half of the time
      and adds noise of standard deviation .5 to the magnitude; the authors'
      always applies it, at that magnitude.

  Differences: the authors' geometry uses the nearest pixel, here it is
  bilinear. The authors' contrast fades to a constant that by an oversight
  depends on the number of pixels, here to the mean grey. Their translations and
  cut-outs are in pixels, here they are fractions of the image size.

  Reference: Cubuk et al., arXiv 1909.13719.
  """

  layers: int
  magnitude: float
  policy: str

  def __call__(self, image: Image, rng: np.random.Generator) -> Image:
    """Returns a changed image of the same shape."""
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
  """Applies greyscale, solarization or blur (sigma .1 to 2 pixels).

  Reference: Touvron et al., arXiv 2204.07118, section 3.2.
  """
  choice = rng.integers(3)
  if choice == 0:
    return ops.greyscale(image)
  if choice == 1:
    return ops.solarize(image)
  return ops.blur(image, rng.uniform(0.1, 2.0))


def color_jitter(
  image: Image, strength: float, rng: np.random.Generator
) -> Image:
  """Brightness, contrast and saturation in random order.

  Args:
    image: the image.
    strength: each factor is uniform in 1 ± strength (0 at least).
    rng: random generator.
  """
  for index in rng.permutation(len(_JITTER)):
    factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
    image = _JITTER[index](image, factor)
  return image


def jitter(
  image: Image, strengths: tuple[float, ...], rng: np.random.Generator
) -> Image:
  """Brightness, contrast, saturation and hue in random order.

  Args:
    image: the image.
    strengths: strengths of these four, 0 or more. The first three factors are
      uniform in 1 ± strength (0 at least); the hue turns by up to ± strength of
      the whole circle, which is at most 1/2.
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
