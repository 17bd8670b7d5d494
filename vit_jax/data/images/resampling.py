"""Resizing of images on the host with the filter given in a config."""

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
  """Resizes an image, with pixel centres at half-integer coordinates.

  Args:
    image: image of at least one pixel.
    height: height of the result, pixels.
    width: width of the result, pixels.
    interpolation: 'bilinear' interpolates between the four nearest pixels, and
      aliases when shrinking (TensorFlow's `resize`, used in the authors' code).
      'area' averages over the area of each result pixel along axes that shrink,
      and is bilinear along axes that grow. 'bilinear_antialias' and 'bicubic'
      (a = -1/2) widen their filter when shrinking; their results are bitwise
      equal to Pillow's, and hence timm's. (Pillow 13 swaps its two passes if
      the height shrinks much more than the width; here the width is always
      resized first.)
  """
  if image.shape[:2] == (height, width):
    return image
  if interpolation == 'area':
    return _by_area(image, height, width)
  if interpolation in _OPENCV:
    flag = _OPENCV[interpolation]
    return cv2.resize(image, (width, height), interpolation=flag)
  # Resizing one axis at a time gives the same result in all Pillow versions.
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
