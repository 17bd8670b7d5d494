"""Converts images of any number of channels to pictures that can be shown."""

import numpy as np
from jaxtyping import Float, Shaped, UInt8


def rgb(
  pixels: Shaped[np.ndarray, '*n y x c'],
) -> UInt8[np.ndarray, '*n y x 3']:
  """Returns images as RGB pictures; RGB images of 8 bits are unchanged.

  Of other images, the first three channels are shown, or the first one in grey
  if there are fewer. In each image, the smallest of their values becomes black
  and the largest one white, because values of 16 bits are often small.

  Args:
    pixels: one image or several.
  """
  if pixels.dtype == np.uint8 and pixels.shape[-1] == 3:
    return pixels
  shown = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1]
  axes = (-3, -2, -1)
  low = shown.min(axes, keepdims=True).astype(np.float64)
  high = shown.max(axes, keepdims=True)
  scaled = np.round(255 * (shown - low) / np.maximum(high - low, 1))
  return np.broadcast_to(scaled, (*shown.shape[:-1], 3)).astype(np.uint8)


def pixels_of(
  images: Float[np.ndarray, '*n y x c'], dtype: np.dtype
) -> Shaped[np.ndarray, '*n y x c']:
  """Returns the pixels of images in [-1, 1].

  Args:
    images: one image or several.
    dtype: dtype of the images before they were normalized; the pixels are
      uint16 if it is uint16, and otherwise uint8.
  """
  kind = np.dtype(np.uint16 if dtype == np.uint16 else np.uint8)
  half = np.iinfo(kind).max / 2
  return np.clip(np.round(images * half + half), 0, 2 * half).astype(kind)
