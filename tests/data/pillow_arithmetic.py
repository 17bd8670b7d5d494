"""NumPy versions of Pillow's hue, box blur and antialiased resizing."""

import cv2
import numpy as np

_BOXES = 3  # successive box means that approximate a Gaussian
_ONE = 2.0**24
_BITS = 22  # fraction bits of a weight; sums of products fit 32 bits


def _triangle(x):
  return np.maximum(1 - np.abs(x), 0)


def _cubic(x):
  """Keys' kernel with a = -1/2."""
  x = np.abs(x)
  near = (1.5 * x - 2.5) * x * x + 1
  far = ((-0.5 * x + 2.5) * x - 4) * x + 2
  return np.where(x < 1, near, np.where(x < 2, far, 0))


# Kernel, and half its width in pixels of the smaller scale.
_FILTERS = {'bilinear_antialias': (_triangle, 1), 'bicubic': (_cubic, 2)}


def hue(image, turn):
  """Rotates the hue, with 8 bits for each of H, S and V."""
  h, s, v = _hsv(image)
  h = (h + int(turn * 255)) % 256
  place = h * np.float32(6 / 255)
  sector = np.floor(place)
  part, share = place - sector, s.astype(np.float32) / 255
  low, falling, rising = (
    np.floor(v * (1 - share * by) + 0.5) for by in (1, part, 1 - part)
  )
  # Red, green and blue in each of the six sectors.
  sources = np.stack([v, low, falling, rising]).astype(np.uint8)
  channels = np.array(
    [[0, 2, 1, 1, 3, 0], [3, 0, 0, 2, 1, 1], [1, 1, 3, 0, 0, 2]]
  )[:, sector.astype(int) % 6]
  return np.take_along_axis(sources, channels, 0).transpose(1, 2, 0).copy()


def _hsv(image):
  """Returns H, S and V, 0 to 255, truncated to integers as in Pillow."""
  # Each step has Pillow's precision: a rounding error may change H by a level,
  # and a colour by up to six levels.
  single, double = np.float32, np.float64
  largest, smallest = image.max(axis=2), image.min(axis=2)
  spread = (largest - smallest).astype(single)
  some = np.maximum(spread, 1)
  red, green, blue = ((largest - image[..., i]) / some for i in range(3))
  is_red, is_green = (image[..., i] == largest for i in range(2))
  sector = np.where(
    is_green, 2 + red.astype(double) - blue, 4 + green.astype(double) - red
  )
  sector = np.where(is_red, blue - green, sector.astype(single))
  turn = (sector.astype(double) / 6 + 1) % 1
  h = turn.astype(single).astype(double) * 255
  s = (spread / np.maximum(largest, 1).astype(single)).astype(double) * 255
  h = np.where(spread > 0, h, 0)
  return h.astype(int), s.astype(int), largest.astype(single)


def soften(image, sigma):
  """Computes three successive box means.

  Reference: Gwosdek et al., "Theoretical Foundations of Gaussian Convolution by
  Extended Box Filtering" (SSVM 2011), equations for the box's length and the
  weight of its ends.
  """
  variance = np.float32(sigma) ** 2 / np.float32(_BOXES)  # as Pillow's
  reach = int((np.sqrt(12 * variance + 1) - 1) / 2)  # whole pixels on each side
  ends = (2 * reach + 1) * (reach * (reach + 1) - 3 * variance)
  ends /= 6 * (variance - (reach + 1) ** 2)
  # Weights of 24 bits, in double precision without any rounding.
  inner = int(_ONE / (2 * (reach + ends) + 1))
  box = np.full(2 * reach + 3, inner, np.float64)
  box[[0, -1]] = (_ONE - (2 * reach + 1) * inner) // 2
  for kernel in (box[None], box[:, None]):
    for _ in range(_BOXES):
      total = cv2.filter2D(
        image, cv2.CV_64F, kernel, borderType=cv2.BORDER_REPLICATE
      )
      image = ((total + _ONE / 2) * (1 / _ONE)).astype(np.uint8)
  return image


def resize(image, height, width, interpolation):
  """Resizes the columns first, with rounding in between."""
  columns = _filter_rows(cv2.transpose(image), width, interpolation)
  return _filter_rows(cv2.transpose(columns), height, interpolation)


def _filter_rows(image, length, interpolation):
  """Resizes the first axis, in integers."""
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


def _taps(length, result_length, interpolation):
  """Returns the source rows of each result row, and weights times 2^22.

  Rows beyond the image's edge have no weight; the others share it.
  """
  kernel, half_width = _FILTERS[interpolation]
  scale = length / result_length
  stretch = max(scale, 1.0)
  reach = half_width * stretch
  centers = (np.arange(result_length) + 0.5) * scale
  first = np.maximum((centers - reach + 0.5).astype(int), 0)
  stop = np.minimum((centers + reach + 0.5).astype(int), length)
  rows = first[:, None] + np.arange((stop - first).max())
  inside = rows < stop[:, None]
  distance = (rows + 0.5 - centers[:, None]) / stretch
  weights = np.where(inside, kernel(distance), 0)
  weights /= weights.sum(axis=1, keepdims=True)
  rounded = np.floor(np.abs(weights) * 2**_BITS + 0.5) * np.sign(weights)
  return np.minimum(rows, length - 1), rounded.astype(np.int32)
