"""Reads sizes and orientations from the headers of encoded images."""

import io
import re
import struct
from typing import NamedTuple

import PIL.Image

# JPEG markers, the byte after 0xFF.
# Markers without a segment: TEM, RST0 to RST7, SOI.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
# SOF0 to SOF15, each for one kind of coding; DHT, JPG and DAC are in between.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END, _EXIF = 0xDA, 0xD9, 0xE1
_APPLICATIONS = range(0xE0, 0xF0)
_PROGRESSIVE = 0xC2
_ORDINARY = (0xC0, 0xC1, _PROGRESSIVE)  # baseline, extended, progressive
_ORIENTATION = 274  # EXIF tag of the orientation
PNG = b'\x89PNG\r\n\x1a\n'
# Formats of `stated_size`; JPEG and TIFF have readers of their own.
_FORMATS = ('PNG', 'GIF', 'BMP', 'WEBP')
_CONVERT = 'convert the file to one of these'
_FETCH = 'copy or download the image again'
# Pattern of the first bytes, kind, remedy. Such files occur with the extensions
# of images, after downloads or in photo libraries.
_OTHER_KINDS = (
  (rb'$', 'an empty file', _FETCH),
  (rb'version https://git-lfs', 'a Git LFS pointer', 'run `git lfs pull`'),
  (rb'....ftypavi[fs]', 'an AVIF image', _CONVERT),
  (rb'....ftyp(hei|hev|mif1|msf1)', 'a HEIC image', _CONVERT),
  (rb'....ftyp', 'a video', 'extract its images'),
  (rb'\xff\x0a|\0\0\0\x0cJXL ', 'a JPEG XL image', _CONVERT),
  (rb'\xff\x4f\xff\x51|\0\0\0\x0cjP  ', 'a JPEG 2000 image', _CONVERT),
  (rb'\s*(<\?xml[^>]*>\s*)?<svg', 'an SVG drawing', _CONVERT),
  (rb'\s*(<!doctype|<html|<head|<\?xml)', 'a web page', _FETCH),
  (rb'PK\x03\x04|\x1f\x8b', 'a compressed archive', 'unpack it'),
  (rb'%PDF', 'a PDF document', 'extract its images'),
  (rb'\0*$', 'a file of zero bytes', _FETCH),
)


class DecodeError(ValueError):
  """Raised for an image or a record that cannot be decoded."""


class Jpeg(NamedTuple):
  """The header of a JPEG file.

  Attributes:
    height: height before the orientation is applied, pixels.
    width: width before the orientation is applied, pixels.
    colors: number of colours: 1 (grey), 3 or 4.
    height_at: offset of the height in the file (two bytes).
    ordinary: whether the file is Huffman-coded with 8 bits and one or three
      colours.
    one_scan: whether one scan contains all colours, from top to bottom.
    block_height: height of a minimum coded unit (MCU), pixels.
    orientation: EXIF orientation, 1 (upright) to 8; from 5 on, height and width
      are swapped.
  """

  height: int
  width: int
  colors: int
  height_at: int
  ordinary: bool
  one_scan: bool
  block_height: int
  orientation: int


def is_jpeg(data: bytes) -> bool:
  """Returns whether the data starts with a JPEG signature."""
  return data[:2] == b'\xff\xd8'


def jpeg(data: bytes) -> Jpeg:
  """Reads the header of a JPEG file, up to the first scan.

  Raises:
    DecodeError: the file has no frame, or no end marker. (Entropy-coded data
      cannot contain the end marker. Without it the file is truncated, and
      decoders would fill the missing part with grey.)
  """
  at, orientation, frame = 2, 1, None
  while True:
    at = data.find(b'\xff', at)
    if at < 0 or at + 4 > len(data):
      raise DecodeError('the file is truncated within its header')
    marker = data[at + 1]
    # 0xFF before a marker is a fill byte; 0xFF 0x00 is not a marker.
    if marker == 0xFF or marker == 0 or marker in _BARE:
      at += 1 if marker == 0xFF else 2
      continue
    if marker in (_SCAN, _END):
      break
    stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], 'big')
    if marker in _FRAMES and frame is None:
      frame = at
    elif marker == _EXIF and data[at + 4 : at + 10] == b'Exif\0\0':
      orientation = exif_orientation(data[at + 4 : stop])
    at = stop
  if marker == _END or frame is None or len(data) < frame + 10:
    raise DecodeError('the JPEG file does not contain an image')
  if data.rfind(b'\xff\xd9', at) < 0:
    raise DecodeError('the JPEG file is truncated: it has no end marker')
  # A frame starts with its marker and its length, two bytes each.
  bits, height, width, colors = struct.unpack_from('>BHHB', data, frame + 4)
  coding = data[frame + 1]
  # Three bytes follow for each colour: its number, its horizontal and vertical
  # sampling factors (4 bits each), and its quantization table.
  sampling_factors = data[frame + 11 : frame + 10 + 3 * colors : 3]
  vertical_factors = [pair & 15 for pair in sampling_factors]  # lower 4 bits
  scan_colors = data[at + 4] if len(data) > at + 4 else 0  # of the first scan
  return Jpeg(
    height,
    width,
    colors,
    height_at=frame + 5,
    ordinary=coding in _ORDINARY and bits == 8 and colors in (1, 3),
    one_scan=coding != _PROGRESSIVE and scan_colors == colors,
    block_height=8 * max([1, *vertical_factors]),
    orientation=orientation,
  )


def without_application_segments(data: bytes) -> bytes:
  """Returns a JPEG without application segments.

  Decoders may emit warnings about such segments.
  """
  parts, at = [data[:2]], 2
  while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
    stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], 'big')
    if data[at + 1] not in _APPLICATIONS:
      parts.append(data[at:stop])
    at = stop
  return b''.join([*parts, data[at:]])


def exif_orientation(exif: bytes) -> int:
  """Returns the orientation in EXIF data, 1 to 8; 1 if absent or damaged."""
  tags = PIL.Image.Exif()
  try:
    tags.load(exif)
    value = tags.get(_ORIENTATION, 1)
  except Exception:  # noqa: BLE001 (damaged EXIF data raise many kinds)
    return 1
  return value if value in range(1, 9) else 1


def stated_size(data: bytes) -> tuple[int, int]:
  """Returns (height, width), pixels, in a PNG, GIF, BMP or WebP header.

  Raises:
    DecodeError: the header is damaged, or the format is another one.
  """
  if data[:8] == PNG and len(data) >= 24:
    # Pillow would take 10 microseconds, as long as decoding a very small image.
    width, height = struct.unpack_from('>II', data, 16)
    return height, width
  try:
    with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as image:
      return image.height, image.width
  except PIL.UnidentifiedImageError as error:
    formats = 'JPEG, PNG, GIF, BMP, WebP or TIFF'
    raise DecodeError(unsupported_message(data, formats)) from error
  except Exception as error:  # noqa: BLE001 (damaged headers raise many kinds)
    raise DecodeError(f'the header cannot be used: {error}') from error


def unsupported_message(data: bytes, formats: str) -> str:
  """Returns the message for data of a format that is not supported.

  Args:
    data: content of the file.
    formats: supported formats.
  """
  for pattern, kind, remedy in _OTHER_KINDS:
    if re.match(pattern, data, re.DOTALL | re.IGNORECASE):
      return f'{kind}, not a {formats} file: {remedy}'
  return (
    f'{len(data)} bytes that are not a {formats} file, starting with '
    f'{data[:16]!r}: convert the file, download it again or remove it'
  )
