"""Resizing of images on the host, by the filter that a recipe names."""

import cv2
import numpy as np
import PIL.Image
from jaxtyping import UInt8

_PILLOW = {
  'bilinear_antialias': PIL.Image.Resampling.BILINEAR,
  'bicubic': PIL.Image.Resampling.BICUBIC,
}
_OPENCV = {'bilinear': cv2.INTER_LINEAR, 'area': cv2.INTER_AREA}
INTERPOLATIONS = (*_OPENCV, *_PILLOW)


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
    interpolation: 'bilinear' interpolates between the four nearest pixels and
      aliases when shrinking (the authors' code, TensorFlow's `resize`). 'area'
      averages over the area of each result pixel where it shrinks an axis, and
      is bilinear where it enlarges one. 'bilinear_antialias' and 'bicubic'
      (a = -1/2) widen their filter when shrinking; they equal Pillow's, and
      hence timm's, to the last bit (Pillow 13 exchanges its two passes where
      the height shrinks much more than the width; here the columns are always
      first).
  """
  if image.shape[:2] == (height, width):
    return image
  if interpolation == 'area':
    return _by_area(image, height, width)
  if interpolation in _OPENCV:
    flag = _OPENCV[interpolation]
    return cv2.resize(image, (width, height), interpolation=flag)
  # One axis at a time: no version of Pillow swaps the two.
  method = _PILLOW[interpolation]
  columns = PIL.Image.fromarray(image).resize((width, len(image)), method)
  return np.array(columns.resize((width, height), method))


def _by_area(
  image: UInt8[np.ndarray, 'y x 3'], height: int, width: int
) -> UInt8[np.ndarray, 'height width 3']:
  """Shrinks by averaging areas, then enlarges bilinearly, axis by axis.

  OpenCV's INTER_AREA repeats pixels where it enlarges, so that a small crop
  would become a mosaic of blocks.
  """
  smaller = min(width, image.shape[1]), min(height, image.shape[0])
  if smaller != image.shape[1::-1]:
    image = cv2.resize(image, smaller, interpolation=cv2.INTER_AREA)
  if smaller != (width, height):
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
  return image
