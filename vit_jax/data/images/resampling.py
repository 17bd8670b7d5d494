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
    interpolation: 'bilinear' between the four nearest pixels, aliasing when
      shrinking (the authors' code, TensorFlow's `resize`); 'area' averages over
      each result pixel's area (enlarging, it is like bilinear);
      'bilinear_antialias' and 'bicubic' (a = -1/2) widen their filter when
      shrinking: Pillow's and hence timm's, to the last bit (but Pillow 13
      swaps its two passes where the height shrinks much more than the width;
      here the columns are always first).
  """
  if image.shape[:2] == (height, width):
    return image
  if interpolation in _OPENCV:
    flag = _OPENCV[interpolation]
    return cv2.resize(image, (width, height), interpolation=flag)
  # One axis at a time: no version of Pillow swaps the two.
  method = _PILLOW[interpolation]
  columns = PIL.Image.fromarray(image).resize((width, len(image)), method)
  return np.array(columns.resize((width, height), method))
