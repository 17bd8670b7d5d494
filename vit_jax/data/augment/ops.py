"""Changes of colour and geometry of one uint8 image, as Pillow defines them.

Nothing is random here; `policies` draws the arguments. Colours follow Pillow's
ImageOps and ImageEnhance (within two grey levels where OpenCV rounds
differently).
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
  """Replaces each value; a table `[256]`, or `[256, 3]` for each channel."""
  table = np.clip(table, 0, 255).astype(np.uint8)
  if table.ndim == 2:
    table = table[None]
  return cv2.LUT(image, table)


def _histogram(image: Image) -> Int[np.ndarray, '256 3']:
  """Pixels of each value, by channel."""
  channels = image.reshape(-1, 3).T
  return np.stack([np.bincount(c, minlength=256) for c in channels], axis=1)


def invert(image: Image) -> Image:
  """255 − v."""
  return 255 - image


def posterize(image: Image, bits: int) -> Image:
  """Keeps the upper bits, 0 to 8."""
  return _look_up(image, _VALUES & ~(2 ** (8 - bits) - 1))


def solarize(image: Image, threshold: int = 128) -> Image:
  """Inverts values from the threshold on, 0 to 256."""
  return _look_up(image, np.where(_VALUES < threshold, _VALUES, 255 - _VALUES))


def solarize_add(image: Image, amount: int) -> Image:
  """Makes values below 128 brighter by the amount."""
  return _look_up(image, np.where(_VALUES < 128, _VALUES + amount, _VALUES))


def brightness(image: Image, factor: float) -> Image:
  """Factor 0 is black, 1 the image."""
  return _look_up(image, factor * _VALUES)


def contrast(image: Image, factor: float) -> Image:
  """Factor 0 is the mean grey, 1 the image."""
  mean = int(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean() + 0.5)
  return _look_up(image, mean + factor * (_VALUES - mean))


def greyscale(image: Image) -> Image:
  """Luma (ITU-R 601) in all three channels."""
  return cv2.merge([cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)] * 3)


def color(image: Image, factor: float) -> Image:
  """Saturation: factor 0 is grey, 1 the image."""
  return cv2.addWeighted(image, factor, greyscale(image), 1 - factor, 0)


def sharpness(image: Image, factor: float) -> Image:
  """Factor 0 is smoothed (but for the border), 1 the image, 2 sharpened."""
  kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
  smooth = image.copy()
  smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, kernel)[1:-1, 1:-1]
  return cv2.addWeighted(image, factor, smooth, 1 - factor, 0)


def auto_contrast(image: Image) -> Image:
  """Stretches each channel to 0…255."""
  low = image.min(axis=(0, 1)).astype(float)
  high = image.max(axis=(0, 1)).astype(float)
  scale = np.where(high > low, 255 / np.maximum(high - low, 1), 1)
  shift = np.where(high > low, -low * scale, 0)
  return _look_up(image, _VALUES[:, None] * scale + shift)


def equalize(image: Image) -> Image:
  """Flattens each channel's histogram."""
  counts = _histogram(image)
  last = 255 - np.argmax(counts[::-1] > 0, axis=0)
  step = (counts.sum(axis=0) - counts[last, np.arange(3)]) // 255
  below = np.cumsum(counts, axis=0) - counts
  table = (below + step // 2) // np.maximum(step, 1)
  return _look_up(image, np.where(step > 0, table, _VALUES[:, None]))


def blur(image: Image, sigma: float) -> Image:
  """Gaussian blur.

  Args:
    image: the image.
    sigma: standard deviation, pixels.
  """
  return cv2.GaussianBlur(image, (0, 0), sigma)


def hue(image: Image, turn: float) -> Image:
  """Turns the hue, in the 8 bits that Pillow gives each of H, S and V.

  Args:
    image: the image.
    turn: share of the whole circle, -1/2 to 1/2; cut off to 1/255 of it, as by
      torchvision.
  """
  hsv = np.array(PIL.Image.fromarray(image).convert('HSV'))
  hsv[..., 0] += np.uint8(int(turn * 255) % 256)  # beyond 255 from 0 again
  turned = PIL.Image.frombytes('HSV', image.shape[1::-1], hsv.tobytes())
  return np.array(turned.convert('RGB'))


def soften(image: Image, sigma: float) -> Image:
  """Gaussian blur as Pillow approximates it: three means over boxes.

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
  """Maps the image by an affine transformation of its coordinates.

  Args:
    image: RGB, `[y, x, 3]`.
    matrix: `[2, 3]`, maps (x, y, 1) of the result to (x, y) of the image,
      pixels, with the origin at the upper left corner (not at a pixel's
      centre).
    bicubic: use Pillow's bicubic filter in place of bilinear interpolation.
    fill: colour of pixels that come from outside the image.
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
  """Reads row y from `slope` · y further right; options as in `affine`."""
  return affine(image, [[1, slope, 0], [0, 1, 0]], **options)


def shear_y(image: Image, slope: float, **options: Any) -> Image:
  """Reads column x from `slope` · x further down; options as in `affine`."""
  return affine(image, [[1, 0, 0], [slope, 1, 0]], **options)


def translate_x(image: Image, pixels: float, **options: Any) -> Image:
  """Reads every pixel from further right; options as in `affine`."""
  return affine(image, [[1, 0, pixels], [0, 1, 0]], **options)


def translate_y(image: Image, pixels: float, **options: Any) -> Image:
  """Reads every pixel from further down; options as in `affine`."""
  return affine(image, [[1, 0, 0], [0, 1, pixels]], **options)


def cut_out(image: Image, y: int, x: int, radius: int) -> Image:
  """Draws a grey square about (y, x), cut off at the border."""
  image = image.copy()
  top, left = max(y - radius, 0), max(x - radius, 0)
  image[top : y + radius, left : x + radius] = GREY
  return image
