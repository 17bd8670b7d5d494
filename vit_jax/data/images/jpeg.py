"""Decodes boxes of JPEG files.

Two decoders return the same pixels, those of libjpeg's accurate DCT with smooth
chroma upsampling: simplejpeg decodes all rows down to the box's lower edge (of
a file of one scan, otherwise the whole image), and OpenCV decodes the files
that simplejpeg does not support. Damage below the rows that are decoded is not
detected, and does not affect any pixel of the box.
"""

from typing import Any

import cv2
import numpy as np
import simplejpeg
from jaxtyping import UInt8

from vit_jax.data.images import headers
from vit_jax.data.images.headers import DecodeError

Box = tuple[int, int, int, int]  # y, x, height, width; pixels
# Sizes at which files can be decoded, as the ratio of the whole size to it.
SHRINKS = (1, 2, 4, 8)
# OpenCV allows IMREAD_COLOR_RGB only without the bit of IMREAD_COLOR, which
# IMREAD_REDUCED_COLOR_* contain; the result has colours nevertheless.
_OPENCV_FLAGS = {
  1: cv2.IMREAD_COLOR_RGB,
  2: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_2,
  4: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_4,
  8: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_8,
}
_EXTRA_ROWS = 2  # chroma upsampling interpolates between neighbouring rows
# The libjpeg warnings after which pixels are grey or noise. Other warnings are
# about surplus bytes or application segments. libjpeg reports only the first
# warning of a file.
_DAMAGE = (
  'premature end',
  'bad huffman code',
  'bad arithmetic code',
  'instead of rst',
)
_DAMAGED = 'the file is damaged or truncated'
_HARMLESS = 'extraneous bytes'


def shrunk(side: int, shrink: int) -> int:
  """Returns the length of a side after shrinking, rounded up as in libjpeg."""
  return -(-side // shrink)


def decode_box(
  data: bytes, header: headers.Jpeg, box: Box, shrink: int = 1
) -> UInt8[np.ndarray, 'y x 3']:
  """Decodes a box of a JPEG to RGB, without applying the EXIF orientation.

  If the image is shrunk, libjpeg computes each block of 8x8 pixels directly at
  8/`shrink` x 8/`shrink` pixels, from its lowest frequencies.

  Args:
    data: content of the file.
    header: result of `headers.jpeg`.
    box: part of the decoded image, before the orientation is applied.
    shrink: ratio of the size of the image to that of the decoded image, one of
      SHRINKS.

  Raises:
    DecodeError: the file is damaged, or none of the decoders supports it.
  """
  y, x, height, width = box
  pixels = None
  if header.ordinary:
    pixels = _simplejpeg(data, header, y + height, shrink)
  if pixels is None:
    _check_damage(data)
    flags = _OPENCV_FLAGS[shrink] | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = opencv(data, flags)
  return pixels[y : y + height, x : x + width]


def opencv(data: bytes, flags: int) -> np.ndarray:
  """Decodes a whole image with OpenCV; the flags determine its channels.

  Args:
    data: content of the file.
    flags: OpenCV's IMREAD_ flags.

  Raises:
    DecodeError: the image cannot be decoded.
  """
  try:
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
  except cv2.error as error:
    raise DecodeError(str(error)) from error
  if pixels is None:
    raise DecodeError(
      f'{_DAMAGED}, or of an unusual kind (JPEGs must be baseline or '
      'progressive and have 8 bits): copy or convert it'
    )
  return pixels


def _check_warning(warning: str) -> None:
  """Raises DecodeError for a warning of libjpeg about missing pixels."""
  if any(words in warning.lower() for words in _DAMAGE):
    raise DecodeError(f'{_DAMAGED}: {warning}')


def _shortened(
  data: bytes, header: headers.Jpeg, bottom: int, shrink: int
) -> tuple[bytes, int]:
  """Returns the file with a reduced height in its header, and that height.

  Decoders then stop below the row `bottom` of the decoded image, and only warn
  about surplus bytes.
  """
  block = header.block_height
  end = (bottom + _EXTRA_ROWS) * shrink
  end = (end + block - 1) // block * block  # rounded up to whole blocks
  if not header.one_scan or end >= header.height:
    return data, header.height
  at = header.height_at
  return data[:at] + end.to_bytes(2, 'big') + data[at + 2 :], end


def _simplejpeg(
  data: bytes, header: headers.Jpeg, bottom: int, shrink: int
) -> UInt8[np.ndarray, 'y x 3'] | None:
  """Decodes all rows above `bottom`, and maybe more, with simplejpeg.

  Returns None if simplejpeg does not support the file.

  Raises:
    DecodeError: these rows are damaged.
  """
  data, rows = _shortened(data, header, bottom, shrink)
  size = shrunk(rows, shrink), shrunk(header.width, shrink)
  pixels = np.empty((*size, 3), np.uint8)
  scale: dict[str, Any] = {}
  if shrink > 1:
    # simplejpeg decodes at the smallest size that is not below these.
    scale = dict(min_height=size[0], min_width=size[1], min_factor=shrink)
  try:
    decoded = simplejpeg.decode_jpeg(data, 'RGB', buffer=pixels, **scale)
    return pixels if decoded.shape[:2] == size else None
  except ValueError as error:
    warning = str(error)
  # simplejpeg raises libjpeg's warnings as errors, although it has decoded the
  # image by then. Its pixels are in the buffer if the header states that size.
  # A shortened file always causes `_HARMLESS`; other warnings are damage.
  if not any(words in warning.lower() for words in (*_DAMAGE, _HARMLESS)):
    return None
  try:
    stated: Any = simplejpeg.decode_jpeg_header(data)
  except ValueError:
    return None
  if tuple(shrunk(side, shrink) for side in stated[:2]) != size:
    return None
  _check_warning(warning)
  return pixels


def _check_damage(data: bytes) -> None:
  """Checks a file for damage by decoding it with simplejpeg.

  OpenCV does not report libjpeg's warnings. If simplejpeg does not support the
  file, the file is not checked.

  Raises:
    DecodeError: the file is damaged.
  """
  try:
    simplejpeg.decode_jpeg(headers.without_application_segments(data))
  except ValueError as error:
    _check_warning(str(error))
