"""Resizing of images on the host with the filter given in a config."""

import cv2
import numpy as np
import PIL.Image

from vit_jax.data.images.multichannel import Pixels

_PILLOW = {
  'bilinear_antialias': PIL.Image.Resampling.BILINEAR,
  'bicubic': PIL.Image.Resampling.BICUBIC,
}
_OPENCV = {'bilinear': cv2.INTER_LINEAR, 'area': cv2.INTER_AREA}
INTERPOLATIONS = (*_OPENCV, *_PILLOW)
_GROUP = 4  # OpenCV averages areas of at most four channels at once


def resize(
  image: Pixels,
  height: int,
  width: int,
  interpolation: str = 'bilinear',
) -> Pixels:
  """Resizes an image, with pixel centres at half-integer coordinates.

  Args:
    image: image of at least one pixel; RGB, or any number of channels of 8 or
      16 bits, which are resized independently of each other.
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
  if image.shape[2] != 3 or image.dtype != np.uint8:
    step = _GROUP if interpolation in _OPENCV else 1
    groups = [
      _resized(
        np.ascontiguousarray(image[..., i : i + step]),
        height,
        width,
        interpolation,
      )
      for i in range(0, image.shape[2], step)
    ]
    return np.concatenate([np.atleast_3d(group) for group in groups], axis=2)
  return _resized(image, height, width, interpolation)


def _resized(
  image: np.ndarray, height: int, width: int, interpolation: str
) -> np.ndarray:
  """Resizes RGB pixels or a group of channels; drops an axis of one channel."""
  if interpolation == 'area':
    return _by_area(image, height, width)
  if interpolation in _OPENCV:
    flag = _OPENCV[interpolation]
    return cv2.resize(image, (width, height), interpolation=flag)
  # Resizing one axis at a time gives the same result in all Pillow versions.
  method = _PILLOW[interpolation]
  if image.shape[2] == 1:
    return _single_channel(image[..., 0], height, width, method)
  columns = PIL.Image.fromarray(image).resize((width, len(image)), method)
  return np.array(columns.resize((width, height), method))


def _single_channel(
  image: np.ndarray, height: int, width: int, method: PIL.Image.Resampling
) -> np.ndarray:
  """Resizes a channel `[y, x]` by Pillow, which computes 16 bits as floats."""
  if image.dtype == np.uint8:
    columns = PIL.Image.fromarray(image).resize((width, len(image)), method)
    return np.array(columns.resize((width, height), method))
  values, last = image.astype(np.float32), np.iinfo(image.dtype).max
  for size in ((width, len(image)), (width, height)):
    resized = PIL.Image.fromarray(values).resize(size, method)
    # Clipped after each axis, as Pillow does with 8 bits.
    values = np.clip(np.asarray(resized), 0, last)
  return np.round(values).astype(image.dtype)


def _by_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
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
