"""Crops: resizing with the aspect ratio kept, centre crops, random boxes."""

import math

import numpy as np
from jaxtyping import UInt8

from vit_jax.data.images.decode import MAX_PIXELS, Box, Image
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.images.resampling import resize

_ATTEMPTS = 10
_ASPECT = (3 / 4, 4 / 3)  # width / height of a random box


def cover(
  pixels: Image,
  height: int,
  width: int,
  interpolation: str,
  fraction: float = 1.0,
) -> UInt8[np.ndarray, 'height2 width2 3']:
  """Resizes an image with its aspect ratio kept, so that it covers a box.

  Args:
    pixels: pixels of the whole image.
    height: height of the box, pixels.
    width: width of the box, pixels.
    interpolation: see `resampling.resize`.
    fraction: ratio of the box's side to the result's, in (0, 1], along the axis
      where this ratio is larger.

  Raises:
    DecodeError: the result would be too large.
  """
  scale = max(height / pixels.shape[0], width / pixels.shape[1]) / fraction
  y, x = (round(side * scale) for side in pixels.shape[:2])
  if y * x > MAX_PIXELS:
    raise DecodeError(
      f'{pixels.shape[1]} x {pixels.shape[0]} pixels: the aspect ratio is too '
      'extreme to resize the image'
    )
  return resize(pixels, max(y, height), max(x, width), interpolation)


def shorter_side(
  pixels: Image, height: int, width: int, interpolation: str, fraction: float
) -> UInt8[np.ndarray, 'height width 3']:
  """Resizes an image by its shorter side, then cuts out the centre.

  The aspect ratio is kept. Sizes are rounded as in torchvision's Resize and
  CenterCrop: the longer side is rounded down, and half pixels to even.

  Args:
    pixels: pixels of the whole image.
    height: height of the result, pixels.
    width: width of the result, pixels.
    interpolation: see `resampling.resize`.
    fraction: ratio of the result's longer side to the resized shorter side.

  Raises:
    DecodeError: the resized image would be too large.
  """
  y, x = pixels.shape[:2]
  short = round(max(height, width) / fraction)
  long = short * max(y, x) // min(y, x)
  if short * long > MAX_PIXELS:
    raise DecodeError(
      f'{x} x {y} pixels: the aspect ratio is too extreme to resize the image'
    )
  y, x = (short, long) if y <= x else (long, short)
  pixels = resize(pixels, y, x, interpolation)
  top, left = round((y - height) / 2), round((x - width) / 2)
  return pixels[top : top + height, left : left + width]


def random_box(
  height: int,
  width: int,
  area: tuple[float, ...],
  rng: np.random.Generator,
  aspect_range: tuple[float, float] = _ASPECT,
) -> Box:
  """Draws a random part of an image as torchvision's `RandomResizedCrop` does.

  The fraction of the area is uniform, and the aspect ratio is log-uniform. If
  ten draws do not fit, the result is the largest centred box of an allowed
  aspect ratio.

  Args:
    height: height of the image, pixels.
    width: width of the image, pixels.
    area: smallest and largest fraction of the image's area.
    rng: random generator.
    aspect_range: smallest and largest width / height of the box.
  """
  low, high = aspect_range
  for _ in range(_ATTEMPTS):
    target = height * width * rng.uniform(area[0], area[1])
    aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
    h, w = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
    if 0 < h <= height and 0 < w <= width:
      y = int(rng.integers(0, height - h, endpoint=True))
      x = int(rng.integers(0, width - w, endpoint=True))
      return y, x, h, w
  aspect = min(max(width / height, low), high)
  h = min(height, max(round(width / aspect), 1))
  w = min(width, max(round(height * aspect), 1))
  return (height - h) // 2, (width - w) // 2, h, w
