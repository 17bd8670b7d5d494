"""Deterministic colour and geometry operations on uint8 images.

`policies` draws their random arguments. Colour operations give the results of
Pillow's ImageOps and ImageEnhance, except for differences of up to two grey
levels where OpenCV rounds differently.
"""

from typing import Any

import cv2
import numpy as np
import PIL.Image
from jaxtyping import Int, UInt8
from PIL import ImageFilter

Image = UInt8[np.ndarray, 'y x 3']
GREY = (128, 128, 128)
_VALUES = np.arange(256)


def _look_up(image: Image, table: np.ndarray) -> Image:
  """Maps values by a table `[256]`, or `[256, 3]` with a column per channel."""
  table = np.clip(table, 0, 255).astype(np.uint8)
  if table.ndim == 2:
    table = table[None]
  return cv2.LUT(image, table)


def _histogram(image: Image) -> Int[np.ndarray, '256 3']:
  """Counts the pixels of each value in each channel."""
  channels = image.reshape(-1, 3).T
  return np.stack([np.bincount(c, minlength=256) for c in channels], axis=1)


def invert(image: Image) -> Image:
  """Inverts the image: 255 − v."""
  return 255 - image


def posterize(image: Image, bits: int) -> Image:
  """Keeps the given number of upper bits, 0 to 8."""
  return _look_up(image, _VALUES & ~(2 ** (8 - bits) - 1))


def solarize(image: Image, threshold: int = 128) -> Image:
  """Inverts values that are at least the threshold, 0 to 256."""
  return _look_up(image, np.where(_VALUES < threshold, _VALUES, 255 - _VALUES))


def solarize_add(image: Image, amount: int) -> Image:
  """Adds an amount to values below 128."""
  return _look_up(image, np.where(_VALUES < 128, _VALUES + amount, _VALUES))


def brightness(image: Image, factor: float) -> Image:
  """Changes the brightness: factor 0 gives black, 1 the unchanged image."""
  return _look_up(image, factor * _VALUES)


def contrast(image: Image, factor: float) -> Image:
  """Changes the contrast: factor 0 gives the mean grey, 1 no change."""
  mean = int(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean() + 0.5)
  return _look_up(image, mean + factor * (_VALUES - mean))


def greyscale(image: Image) -> Image:
  """Converts to greyscale: luma (ITU-R 601) in all three channels."""
  return cv2.merge([cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)] * 3)


def color(image: Image, factor: float) -> Image:
  """Changes the saturation: factor 0 gives greyscale, 1 no change."""
  return cv2.addWeighted(image, factor, greyscale(image), 1 - factor, 0)


def sharpness(image: Image, factor: float) -> Image:
  """Changes the sharpness: factor 0 smooths, 1 has no effect, 2 sharpens.

  Pixels at the border do not change.
  """
  kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
  smooth = image.copy()
  smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, kernel)[1:-1, 1:-1]
  return cv2.addWeighted(image, factor, smooth, 1 - factor, 0)


def auto_contrast(image: Image) -> Image:
  """Stretches each channel to the range 0 to 255."""
  low = image.min(axis=(0, 1)).astype(float)
  high = image.max(axis=(0, 1)).astype(float)
  scale = np.where(high > low, 255 / np.maximum(high - low, 1), 1)
  shift = np.where(high > low, -low * scale, 0)
  return _look_up(image, _VALUES[:, None] * scale + shift)


def equalize(image: Image) -> Image:
  """Equalizes the histogram of each channel."""
  counts = _histogram(image)
  last = 255 - np.argmax(counts[::-1] > 0, axis=0)
  step = (counts.sum(axis=0) - counts[last, np.arange(3)]) // 255
  below = np.cumsum(counts, axis=0) - counts
  table = (below + step // 2) // np.maximum(step, 1)
  return _look_up(image, np.where(step > 0, table, _VALUES[:, None]))


def blur(image: Image, sigma: float) -> Image:
  """Applies a Gaussian blur.

  Args:
    image: the image.
    sigma: standard deviation, pixels.
  """
  return cv2.GaussianBlur(image, (0, 0), sigma)


def hue(image: Image, turn: float) -> Image:
  """Rotates the hue in Pillow's HSV representation of 8 bits per channel.

  Args:
    image: the image.
    turn: fraction of the full circle, -1/2 to 1/2; truncated to a multiple of
      1/255, as in torchvision.
  """
  hsv = np.array(PIL.Image.fromarray(image).convert('HSV'))
  hsv[..., 0] += np.uint8(int(turn * 255) % 256)  # wraps around at 256
  turned = PIL.Image.frombytes('HSV', image.shape[1::-1], hsv.tobytes())
  return np.array(turned.convert('RGB'))


def soften(image: Image, sigma: float) -> Image:
  """Applies Pillow's approximate Gaussian blur, three successive box means.

  Args:
    image: the image.
    sigma: standard deviation, pixels; Pillow's `radius`.
  """
  softened = PIL.Image.fromarray(image).filter(ImageFilter.GaussianBlur(sigma))
  return np.array(softened)


def affine(
  image: Image,
  matrix: list[list[float]],
  bicubic: bool = False,
  fill: tuple[int, ...] = GREY,
) -> Image:
  """Applies an affine transformation of the coordinates.

  Args:
    image: RGB, `[y, x, 3]`.
    matrix: matrix `[2, 3]` that maps (x, y, 1) of the result to (x, y) of the
      image, in pixels. The origin is the upper left corner of the image, not
      the centre of a pixel.
    bicubic: use Pillow's bicubic filter in place of bilinear interpolation.
    fill: colour of pixels that are mapped from outside the image.
  """
  (a, b, c), (d, e, f) = matrix
  if bicubic:
    changed = PIL.Image.fromarray(image).transform(
      image.shape[1::-1],
      PIL.Image.Transform.AFFINE,
      (a, b, c, d, e, f),
      resample=PIL.Image.Resampling.BICUBIC,
      fillcolor=fill,
    )
    return np.array(changed)
  centered = np.array(
    [[a, b, c + (a + b - 1) / 2], [d, e, f + (d + e - 1) / 2]]
  )
  return cv2.warpAffine(
    image,
    centered,
    (image.shape[1], image.shape[0]),
    flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
    borderValue=fill,
  )


def rotate(image: Image, degrees: float, **options: Any) -> Image:
  """Rotates counter-clockwise about the centre; options as in `affine`."""
  cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
  y, x = image.shape[0] / 2, image.shape[1] / 2
  matrix = [
    [cos, -sin, x - cos * x + sin * y],
    [sin, cos, y - sin * x - cos * y],
  ]
  return affine(image, matrix, **options)


def shear_x(image: Image, slope: float, **options: Any) -> Image:
  """Moves row y to the left by `slope` · y; options as in `affine`."""
  return affine(image, [[1, slope, 0], [0, 1, 0]], **options)


def shear_y(image: Image, slope: float, **options: Any) -> Image:
  """Moves column x up by `slope` · x; options as in `affine`."""
  return affine(image, [[1, 0, 0], [slope, 1, 0]], **options)


def translate_x(image: Image, pixels: float, **options: Any) -> Image:
  """Moves the image left by `pixels`; options as in `affine`."""
  return affine(image, [[1, 0, pixels], [0, 1, 0]], **options)


def translate_y(image: Image, pixels: float, **options: Any) -> Image:
  """Moves the image up by `pixels`; options as in `affine`."""
  return affine(image, [[1, 0, 0], [0, 1, pixels]], **options)


def cut_out(image: Image, y: int, x: int, radius: int) -> Image:
  """Draws a grey square with side 2 · `radius` and centre (y, x), clipped."""
  image = image.copy()
  top, left = max(y - radius, 0), max(x - radius, 0)
  image[top : y + radius, left : x + radius] = GREY
  return image
