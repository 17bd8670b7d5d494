"""Crops: resizing with the aspect ratio kept, centre crops, random boxes."""

import math

import numpy as np

from vit_jax.data.images.decode import MAX_PIXELS, Box
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.images.multichannel import Pixels
from vit_jax.data.images.resampling import resize

_ATTEMPTS = 10
_ASPECT = (3 / 4, 4 / 3)  # width / height of a random box


def cover(
  pixels: Pixels, height: int, width: int, interpolation: str
) -> Pixels:
  """Resizes an image with its aspect ratio kept, so that it covers a box.

  Args:
    pixels: pixels of the whole image.
    height: height of the box, pixels.
    width: width of the box, pixels.
    interpolation: see `resampling.resize`.

  Raises:
    DecodeError: the result would be too large.
  """
  y, x = covering_size(pixels.shape[0], pixels.shape[1], height, width)
  return resize(pixels, y, x, interpolation)


def covering_size(
  y: int, x: int, height: int, width: int, fraction: float = 1.0
) -> tuple[int, int]:
  """Returns the size of an image resized to cover a box, aspect ratio kept.

  Args:
    y: height of the whole image, pixels.
    x: width of the whole image, pixels.
    height: height of the box, pixels.
    width: width of the box, pixels.
    fraction: ratio of the box's side to the result's, in (0, 1], along the axis
      where this ratio is larger.

  Raises:
    DecodeError: the resized image would be too large.
  """
  scale = max(height / y, width / x) / fraction
  resized_y, resized_x = round(y * scale), round(x * scale)
  _check_resized(y, x, resized_y * resized_x)
  return max(resized_y, height), max(resized_x, width)


def shorter_side_size(
  y: int, x: int, height: int, width: int, fraction: float
) -> tuple[int, int]:
  """Returns the size of an image resized by its shorter side.

  The aspect ratio is kept. As in torchvision's Resize, the longer side is
  rounded down.

  Args:
    y: height of the whole image, pixels.
    x: width of the whole image, pixels.
    height: height of the centre that is cut out afterwards, pixels.
    width: width of the centre that is cut out afterwards, pixels.
    fraction: ratio of the centre's longer side to the resized shorter side.

  Raises:
    DecodeError: the resized image would be too large.
  """
  short = round(max(height, width) / fraction)
  long = short * max(y, x) // min(y, x)
  _check_resized(y, x, short * long)
  return (short, long) if y <= x else (long, short)


def _check_resized(y: int, x: int, resized_pixels: int) -> None:
  if resized_pixels > MAX_PIXELS:
    raise DecodeError(
      f'{x} x {y} pixels: the aspect ratio is too extreme to resize the image'
    )


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
