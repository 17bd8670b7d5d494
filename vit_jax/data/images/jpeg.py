"""Boxes of JPEG files, decoded by the fastest library available, and damage.

Three ways lead to the same pixels, those of libjpeg's accurate transform with
smooth chroma upsampling: libjpeg-turbo 3 decodes the box only (`turbojpeg.py`),
simplejpeg stops below it, and OpenCV decodes what neither supports. The first
two get the same bytes, for a file of one scan those above the box's lower edge,
so that they agree on which records are damaged. Damage below the box is not
detected, and no pixel depends on it.
"""

import cv2
import numpy as np
import simplejpeg
from jaxtyping import UInt8

from vit_jax.data.images import headers, turbojpeg
from vit_jax.data.images.headers import DecodeError

Box = tuple[int, int, int, int]  # y, x, height, width; pixels
_ROWS_BESIDE = 2  # colours are smoothed over the neighbours
# Of libjpeg's warnings, those after which pixels are grey or noise. The others
# are about bytes too many, or about applications' headers; only the first
# warning of a file is known.
_DAMAGE = (
  'premature end',
  'bad huffman code',
  'bad arithmetic code',
  'instead of rst',
)
_HARMLESS = 'extraneous bytes'


def decode_box(
  data: bytes, header: headers.Jpeg, box: Box
) -> UInt8[np.ndarray, 'y x 3']:
  """RGB pixels of a box of a JPEG as it is stored.

  Args:
    data: the file.
    header: result of `headers.jpeg`.
    box: within its size.

  Raises:
    DecodeError: damaged, or of a kind that nothing here decodes.
  """
  y, x, height, width = box
  if header.ordinary:
    part, rows = _shortened(data, header, y + height)
    found = turbojpeg.decode_box(part, rows, header.width, box)
    if found is None:
      found = _simplejpeg(part, rows, header.width, box)
    if found is not None:
      _judge(found.warning)
      return found.pixels
  _judge(_warning(data))
  flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
  return opencv(data, flags)[y : y + height, x : x + width]


def opencv(data: bytes, flags: int) -> UInt8[np.ndarray, 'y x 3']:
  """Decodes a whole image with OpenCV.

  Raises:
    DecodeError: it cannot be decoded.
  """
  try:
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
  except cv2.error as error:
    raise DecodeError(str(error)) from error
  if pixels is None:
    raise DecodeError('damaged or cut short')
  return pixels


def _judge(warning: str) -> None:
  if any(words in warning.lower() for words in _DAMAGE):
    raise DecodeError(f'damaged or cut short: {warning}')


def _shortened(
  data: bytes, header: headers.Jpeg, bottom: int
) -> tuple[bytes, int]:
  """Returns a file whose header ends the image below `bottom`, and its rows.

  Decoders stop there, and emit no warning other than about surplus bytes.
  """
  end, block = bottom + _ROWS_BESIDE, header.block_height
  end = (end + block - 1) // block * block
  if not header.one_scan or end >= header.height:
    return data, header.height
  at = header.height_at
  return data[:at] + end.to_bytes(2, 'big') + data[at + 2 :], end


def _simplejpeg(
  data: bytes, height: int, width: int, box: Box
) -> turbojpeg.Decoded | None:
  """Decodes all rows and columns, with the result of `turbojpeg.decode_box`."""
  pixels, warning = np.empty((height, width, 3), np.uint8), ''
  try:
    size = simplejpeg.decode_jpeg(data, 'RGB', buffer=pixels).shape[:2]
  except ValueError as error:
    warning = str(error)
    size = _size_despite(data, warning)
  if size != (height, width):
    return None
  y, x, rows, columns = box
  return turbojpeg.Decoded(pixels[y : y + rows, x : x + columns], warning)


def _size_despite(data: bytes, message: str) -> tuple[int, int] | None:
  """Returns the decoded size.

  The result is None if the message means that nothing was decoded.
  """
  if not any(words in message.lower() for words in (*_DAMAGE, _HARMLESS)):
    return None
  try:
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    return int(height), int(width)
  except ValueError:
    return None


def _warning(data: bytes) -> str:
  """Returns libjpeg's warning about a file that OpenCV decodes; '' for none.

  If simplejpeg does not support the sampling, the result is ''.
  """
  try:
    simplejpeg.decode_jpeg(headers.without_applications(data))
  except ValueError as error:
    return str(error)
  return ''
