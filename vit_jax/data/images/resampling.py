"""Resizing of images on the host, by the filter that a recipe names."""

import cv2
import numpy as np
from jaxtyping import Float, Int, UInt8

_BITS = 22  # of the fraction of a weight; a sum of products fits 32 bits


def _triangle(x: np.ndarray) -> np.ndarray:
  return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
  """Keys' kernel with a = -1/2."""
  x = np.abs(x)
  near = (1.5 * x - 2.5) * x * x + 1
  far = ((-0.5 * x + 2.5) * x - 4) * x + 2
  return np.where(x < 1, near, np.where(x < 2, far, 0))


# Antialiased filters: kernel and half its width, in pixels of the smaller scale
_FILTERS = {'bilinear_antialias': (_triangle, 1), 'bicubic': (_cubic, 2)}
_OPENCV = {'bilinear': cv2.INTER_LINEAR, 'area': cv2.INTER_AREA}
INTERPOLATIONS = (*_OPENCV, *_FILTERS)


def resize(
  image: UInt8[np.ndarray, 'y x 3'],
  height: int,
  width: int,
  interpolation: str = 'bilinear',
) -> UInt8[np.ndarray, 'height width 3']:
  """Resizes with half-pixel centres.

  Args:
    image: at least one pixel.
    height: wanted, pixels.
    width: wanted, pixels.
    interpolation: 'bilinear' between the four nearest pixels, aliasing when
      shrinking (the authors' code, TensorFlow's `resize`); 'area' averages over
      each result pixel's area (enlarging, it is like bilinear);
      'bilinear_antialias' and 'bicubic' (a = -1/2) widen their filter when
      shrinking: Pillow's and hence timm's, to the last bit (but Pillow 13
      swaps its two passes where the height shrinks much more than the width).
  """
  if image.shape[:2] == (height, width):
    return image
  if interpolation in _OPENCV:
    flag = _OPENCV[interpolation]
    return cv2.resize(image, (width, height), interpolation=flag)
  # Columns first and rounded in between, as Pillow does; along rows of memory.
  columns = _filter_rows(cv2.transpose(image), width, interpolation)
  return _filter_rows(cv2.transpose(columns), height, interpolation)


def _filter_rows(
  image: UInt8[np.ndarray, 'rows x 3'], length: int, interpolation: str
) -> UInt8[np.ndarray, 'length x 3']:
  """Resizes the first axis, in integers: the same on every machine."""
  if len(image) == length:
    return image
  rows, weights = _taps(len(image), length, interpolation)
  pixels = image.reshape(len(image), -1).astype(np.int32)
  total = np.full((length, pixels.shape[1]), 1 << (_BITS - 1), np.int32)
  term = np.empty_like(total)
  for tap in range(rows.shape[1]):
    np.take(pixels, rows[:, tap], axis=0, out=term, mode='clip')
    term *= weights[:, tap, None]
    total += term
  total >>= _BITS
  return total.clip(0, 255).astype(np.uint8).reshape(length, -1, 3)


def _taps(
  length: int, wanted: int, interpolation: str
) -> tuple[Int[np.ndarray, 'wanted taps'], Int[np.ndarray, 'wanted taps']]:
  """Which rows each wanted row is made of, and their weights times 2^22.

  Rows beyond the image's edge have no weight; the others share it.
  """
  kernel, half_width = _FILTERS[interpolation]
  scale = length / wanted
  stretch = max(scale, 1.0)
  reach = half_width * stretch
  centers: Float[np.ndarray, ' wanted'] = (np.arange(wanted) + 0.5) * scale
  first = np.maximum((centers - reach + 0.5).astype(int), 0)
  stop = np.minimum((centers + reach + 0.5).astype(int), length)
  rows = first[:, None] + np.arange((stop - first).max())
  inside = rows < stop[:, None]
  distance = (rows + 0.5 - centers[:, None]) / stretch
  weights = np.where(inside, kernel(distance), 0)
  weights /= weights.sum(axis=1, keepdims=True)
  rounded = np.floor(np.abs(weights) * 2**_BITS + 0.5) * np.sign(weights)
  return np.minimum(rows, length - 1), rounded.astype(np.int32)
