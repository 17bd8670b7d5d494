"""Reads images of any number of channels, with 8 or 16 bits per channel.

Supported are TIFF files (read by tifffile), PNG files (OpenCV), NumPy files
(.npy) and arrays. Nothing is converted: a file must have the expected channels
and bits, because channels that were dropped or repeated would not be noticed.

The size, the channels and the bits are read from the header and compared before
anything is decoded, so that a header with a huge size cannot exhaust the
memory.

Images of any number of channels can also be converted to pictures that can be
shown.
"""

import io
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Float, Shaped, UInt8, UInt16

from vit_jax.data.images import headers, jpeg, tiff
from vit_jax.data.images.headers import DecodeError

# `[y, x, channels]`. Height and width are not named, because jaxtyping would
# then require those of arguments and results of a function to be equal.
Pixels = UInt8[np.ndarray, '_ _ c'] | UInt16[np.ndarray, '_ _ c']

BITS = (8, 16)
_MAX_BYTES = 3 * 2**27  # as many as in the largest RGB image of `decode`
_NPY_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}
_NPY = b'\x93NUMPY'
# PNG colour type: indices of its channels in the result of OpenCV, which has
# the order BGR. Grey with alpha is decoded to BGR with alpha.
_PNG_CHANNELS = {0: (0,), 2: (2, 1, 0), 4: (0, 3), 6: (2, 1, 0, 3)}
_PNG_HEADER = 26  # bytes up to the colour type
_MIN_IS_WHITE = 0  # TIFF's PhotometricInterpretation


def is_npy(data: bytes) -> bool:
  """Returns whether the data starts with the signature of a NumPy file."""
  return data[:6] == _NPY


def decode(image: bytes | np.ndarray, channels: int, bits: int) -> Pixels:
  """Decodes a whole image.

  Args:
    image: a TIFF, PNG or .npy file, or an array. Arrays and .npy files are
      `[y, x, channels]` or, for one channel, `[y, x]`.
    channels: number of channels that the image must have.
    bits: number of bits per channel that the image must have, 8 or 16.

  Returns:
    Pixels `[y, x, channels]`, uint8 for 8 bits and uint16 for 16 bits. The
    channels of PNG files are in the order RGB and alpha.

  Raises:
    DecodeError: the image has other channels, bits or dimensions, or another
      format; or it is too large, damaged or truncated.
  """
  expected = _Expected(channels, bits)
  if isinstance(image, np.ndarray):
    expected.check(image.dtype, image.shape)
    pixels = image
  elif is_npy(image):
    pixels = _npy(image, expected)
  elif image[:8] == headers.PNG and len(image) >= _PNG_HEADER:
    pixels = _png(image, expected)
  elif tiff.is_tiff(image):
    pixels = _tiff(image, expected)
  else:
    raise DecodeError(
      f'{headers.unsupported_message(image, "TIFF, PNG or .npy")}; {expected}'
    )
  # Native byte order and one axis for the channels.
  return np.ascontiguousarray(np.atleast_3d(pixels), f'uint{bits}')


class _Expected(NamedTuple):
  """The channels and bits that an image must have."""

  channels: int
  bits: int

  def __str__(self) -> str:
    return (
      f'expected: uint{self.bits} [y, x, {self.channels}], as config keys '
      f'channels={self.channels} and bits={self.bits}'
    )

  def check(self, dtype: np.dtype | str, shape: Sequence[int]) -> None:
    """Checks the header of an image.

    Args:
      dtype: type of its values, in any byte order.
      shape: height, width and, except for one channel, number of channels.

    Raises:
      DecodeError: the image has other channels, bits or dimensions, or is too
        large.
    """
    name = dtype if isinstance(dtype, str) else dtype.name
    channels = shape[2] if len(shape) == 3 else 1
    if (
      (name, channels) != (f'uint{self.bits}', self.channels)
      or len(shape) not in (2, 3)
      or min(shape) < 1
      or math.prod(shape) * self.bits > 8 * _MAX_BYTES
    ):
      raise DecodeError(
        f'the image is {name} {list(shape)}; {self}, up to {_MAX_BYTES} bytes'
      )


def _npy(data: bytes, expected: _Expected) -> np.ndarray:
  """Reads a NumPy file of numbers, in the byte order of the file."""
  file = io.BytesIO(data)
  try:
    version = np.lib.format.read_magic(file)
    shape, columns_first, dtype = _NPY_HEADERS[version](file)
  except Exception as error:  # noqa: BLE001 (damaged headers raise many kinds)
    raise DecodeError(f'the .npy header cannot be used: {error}') from error
  expected.check(dtype, shape)
  start, size = file.tell(), math.prod(shape)
  if len(data) != start + size * dtype.itemsize:
    raise DecodeError(
      f'{len(data)} bytes, but header: {start + size * dtype.itemsize}'
    )
  # Not `np.load`, which could unpickle objects.
  values = np.frombuffer(data, dtype, size, start)
  return values.reshape(shape, order='F' if columns_first else 'C')


def _png(data: bytes, expected: _Expected) -> np.ndarray:
  """Decodes a PNG file without a palette."""
  # The header follows the signature, and the length and name of its chunk.
  width, height, depth, kind = struct.unpack_from('>IIBB', data, 16)
  if kind not in _PNG_CHANNELS:
    raise DecodeError(f'the PNG file has a palette; {expected}')
  order = _PNG_CHANNELS[kind]
  expected.check(f'uint{depth}', (height, width, len(order)))
  pixels = np.atleast_3d(jpeg.opencv(data, cv2.IMREAD_UNCHANGED))
  return pixels[..., order]


def _tiff(data: bytes, expected: _Expected) -> np.ndarray:
  """Decodes the first image of a TIFF file.

  Channels are the samples of a pixel, stored together or in planes, or several
  pages of the same size.
  """
  with tiff.opened(data) as file:
    image = file.series[0]
    # The axis of channels comes first, unless they are the samples (S) of a
    # pixel that are stored together.
    axis = 0 if image.ndim == 3 and image.axes[-1] != 'S' else -1
    order = [*range(image.ndim)]
    order.append(order.pop(axis))
    expected.check(image.dtype, [image.shape[i] for i in order])
    if image.keyframe.nbytes > _MAX_BYTES:  # larger than the metadata claim
      raise DecodeError(f'a page has the shape {list(image.keyframe.shape)}')
    tiff.check_segments(data, image.pages, _MAX_BYTES)
    pixels = image.asarray(maxworkers=1).transpose(order)
    inverted = file.pages.first.photometric == _MIN_IS_WHITE
  return np.iinfo(pixels.dtype).max - pixels if inverted else pixels


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
  half = np.iinfo(kind).max / 2  # -1 becomes 0, and 1 becomes 2 · half
  return np.clip(np.round(images * half + half), 0, 2 * half).astype(kind)
