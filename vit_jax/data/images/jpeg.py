"""Decodes boxes of JPEG files with the fastest library that is available.

Three decoders return the same pixels, those of libjpeg's accurate DCT with
smooth chroma upsampling: libjpeg-turbo 3 decodes only the box
(`turbojpeg.py`), simplejpeg decodes all rows down to the box's lower edge, and
OpenCV decodes the files that neither of them supports. The first two are given
the same bytes (for a file of one scan, those of the rows above the box's lower
edge), so that they detect the same damage. Damage below the box is not
detected, and does not affect any pixel of the box.
"""

from typing import Any

import cv2
import numpy as np
import simplejpeg
from jaxtyping import UInt8

from vit_jax.data.images import headers, turbojpeg
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
  if header.ordinary:
    part, rows = _shortened(data, header, y + height, shrink)
    size = shrunk(rows, shrink), shrunk(header.width, shrink)
    decoded = turbojpeg.decode_box(part, *size, box, shrink)
    if decoded is None:
      decoded = _simplejpeg(part, *size, box, shrink)
    if decoded is not None:
      _check_warning(decoded.warning)
      return decoded.pixels
  _check_warning(_warning(data))
  flags = _OPENCV_FLAGS[shrink] | cv2.IMREAD_IGNORE_ORIENTATION
  failure = _DAMAGED
  if not header.ordinary:
    failure = (
      f'a JPEG of {header.colors} colours with {header.kind} cannot be '
      'decoded, or it is truncated; supported are baseline and progressive '
      'JPEGs of 8 bits: convert the file'
    )
  return opencv(data, flags, failure)[y : y + height, x : x + width]


def opencv(data: bytes, flags: int, failure: str = _DAMAGED) -> np.ndarray:
  """Decodes a whole image with OpenCV; the flags determine its channels.

  Args:
    data: content of the file.
    flags: OpenCV's IMREAD_ flags.
    failure: message if OpenCV cannot decode the image.

  Raises:
    DecodeError: the image cannot be decoded.
  """
  try:
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
  except cv2.error as error:
    raise DecodeError(str(error)) from error
  if pixels is None:
    raise DecodeError(failure)
  return pixels


def _check_warning(warning: str) -> None:
  if any(words in warning.lower() for words in _DAMAGE):
    raise DecodeError(f'{_DAMAGED}: {warning}')


def _shortened(
  data: bytes, header: headers.Jpeg, bottom: int, shrink: int
) -> tuple[bytes, int]:
  """Returns the file with a reduced height in its header, and that height.

  Decoders then stop below the row `bottom` of the decoded image, and only warn
  about surplus bytes.
  """
  end, block = (bottom + _EXTRA_ROWS) * shrink, header.block_height
  end = (end + block - 1) // block * block
  if not header.one_scan or end >= header.height:
    return data, header.height
  at = header.height_at
  return data[:at] + end.to_bytes(2, 'big') + data[at + 2 :], end


def _simplejpeg(
  data: bytes, height: int, width: int, box: Box, shrink: int
) -> turbojpeg.Decoded | None:
  """Decodes all rows with simplejpeg; returns what `turbojpeg` would return."""
  pixels, warning = np.empty((height, width, 3), np.uint8), ''
  scale: dict[str, Any] = {}
  if shrink > 1:
    scale = dict(min_height=height, min_width=width, min_factor=shrink)
  try:
    decoded = simplejpeg.decode_jpeg(data, 'RGB', buffer=pixels, **scale)
    size = decoded.shape[:2]
  except ValueError as error:
    warning = str(error)
    size = _decoded_size(data, warning)
    size = size and (shrunk(size[0], shrink), shrunk(size[1], shrink))
  if size != (height, width):
    return None
  y, x, rows, columns = box
  return turbojpeg.Decoded(pixels[y : y + rows, x : x + columns], warning)


def _decoded_size(data: bytes, message: str) -> tuple[int, int] | None:
  """Returns (height, width) of an image that was decoded with a warning.

  Returns None if the message means that nothing was decoded.
  """
  if not any(words in message.lower() for words in (*_DAMAGE, _HARMLESS)):
    return None
  try:
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    return int(height), int(width)
  except ValueError:
    return None


def _warning(data: bytes) -> str:
  """Returns libjpeg's first warning about a file, or ''.

  OpenCV does not report warnings, so simplejpeg decodes the file for them. If
  simplejpeg does not support the chroma subsampling, the result is its error
  message, which `_check_warning` ignores.
  """
  try:
    simplejpeg.decode_jpeg(headers.without_applications(data))
  except ValueError as error:
    return str(error)
  return ''
