"""From encoded files to RGB pixels: no bombs, no half images, few rows.

Reads JPEG, PNG, GIF (first frame), BMP, WebP and TIFF (first page). The size is
read from the header before anything is decoded, so that a small file cannot
claim all memory. Other formats are refused: their size would not be known.

Of a JPEG only the wanted box is decoded, or all above it (`data/jpeg.py`);
everything else goes to OpenCV. These are the pixels of full decoding, not an
approximation. What OpenCV lets pass it does not tell: of damage within a BMP, a
WebP or a TIFF some stays unseen.

Two differences from TensorFlow's `decode_jpeg`, by which the authors' weights
were trained: an EXIF orientation is applied here and ignored there, and JPEG is
decoded with the accurate integer DCT here, with the fast one there, by which
images are some .7 of a grey level darker.

Measured on 250 ImageNet photographs (most 500x375), inception crop to 224
pixels, CPU time of decoding: all of it by OpenCV takes 1.2 to 1.3 times as long
as decoding the box (libjpeg-turbo 3), all above the box's lower edge
(simplejpeg) 1.09 to 1.15 times. Decoding at 1/2, 1/4 or 1/8 where a crop is
that much too large is left out: it concerns 3 % of the crops, would make all
together another 1.025 times as fast, and change those by 4.6 grey levels on
average.
"""

from collections.abc import Callable

import cv2
import numpy as np
from jaxtyping import UInt8

from vit_jax.data.images import headers, jpeg
from vit_jax.data.images.headers import DecodeError

Image = UInt8[np.ndarray, 'y x 3']
Box = tuple[int, int, int, int]  # y, x, height, width; pixels

MAX_PIXELS = 2**27  # 134 million, 400 MB; the largest cameras make 102 million


def decode(image: bytes | np.ndarray) -> Image:
  """Decodes a whole image to RGB, upright.

  Greyscale becomes three equal channels; 16 bits keep the upper 8; a palette is
  looked up; transparency is dropped, the colours staying as stored; CMYK is
  converted without its profile; an EXIF orientation is applied.

  Args:
    image: an encoded file, or pixels: uint8 `[y, x]`, `[y, x, 1]`, `[y, x, 3]`.

  Raises:
    DecodeError: no file of a known format, damaged or cut short, larger than
      MAX_PIXELS, or not uint8.
  """
  return decode_box(image, lambda height, width: (0, 0, height, width))


def decode_box(
  image: bytes | np.ndarray, box_of: Callable[[int, int], Box]
) -> Image:
  """Decodes the part of an image that `box_of(height, width)` returns.

  Args:
    image: see `decode`.
    box_of: function from the size of the upright image, pixels, to the box.

  Returns:
    The pixels of `decode(image)` in the box.

  Raises:
    DecodeError: as `decode`.
  """
  if isinstance(image, np.ndarray):
    return _cut(_rgb(image), box_of)
  if headers.is_jpeg(image):
    return _jpeg_box(image, box_of)
  _check_size(*headers.stated_size(image))
  return _cut(jpeg.opencv(image, cv2.IMREAD_COLOR_RGB), box_of)


def _cut(
  pixels: Image, box_of: Callable[[int, int], Box]
) -> UInt8[np.ndarray, 'height width 3']:
  y, x, height, width = box_of(pixels.shape[0], pixels.shape[1])
  return pixels[y : y + height, x : x + width]


def _check_size(height: int, width: int) -> None:
  if min(height, width) < 1 or height * width > MAX_PIXELS:
    raise DecodeError(
      f'{width} x {height} pixels; allowed: {MAX_PIXELS} in all'
    )


def _rgb(pixels: np.ndarray) -> Image:
  if pixels.ndim == 2:
    pixels = pixels[:, :, None]
  known = pixels.ndim == 3 and pixels.shape[2] in (1, 3)
  if pixels.dtype != np.uint8 or not known or not pixels.size:
    raise DecodeError(
      f'pixels of {pixels.dtype} {pixels.shape}; allowed: uint8, [y, x], '
      '[y, x, 1] or [y, x, 3]'
    )
  return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def _jpeg_box(data: bytes, box_of: Callable[[int, int], Box]) -> Image:
  header = headers.jpeg(data)
  size = (header.height, header.width)
  _check_size(*size)
  if header.orientation != 1:
    pixels = _upright(
      jpeg.decode_box(data, header, (0, 0, *size)), header.orientation
    )
    return _cut(pixels, box_of)
  return jpeg.decode_box(data, header, box_of(*size))


def _upright(
  pixels: Image, orientation: int
) -> UInt8[np.ndarray, 'height width 3']:
  """Undoes an EXIF orientation: transposed from 5 on, and then mirrored."""
  if orientation >= 5:
    pixels = pixels.transpose(1, 0, 2)
  if orientation in (3, 4, 7, 8):
    pixels = pixels[::-1]
  if orientation in (2, 3, 6, 7):
    pixels = pixels[:, ::-1]
  return np.ascontiguousarray(pixels)
