"""Reads sizes and orientations from the headers of encoded images."""

import struct
from typing import NamedTuple

# JPEG markers, the byte after 0xFF.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a segment
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END, _EXIF = 0xDA, 0xD9, 0xE1
_APPLICATIONS = range(0xE0, 0xF0)
_PROGRESSIVE = 0xC2
_ORDINARY = (0xC0, 0xC1, _PROGRESSIVE)  # baseline, extended, progressive


# Tags of TIFF and EXIF, and the types of integers of 2 and 4 bytes.
_WIDTH, _HEIGHT, _ORIENTATION = 256, 257, 274
_SHORT, _LONG = 3, 4
_TIFF = (b'II*\0', b'II+\0', b'MM\0*', b'MM\0+')


class DecodeError(ValueError):
  """Raised for an image or a record that cannot be decoded."""


class Jpeg(NamedTuple):
  """The header of a JPEG file.

  Attributes:
    height: height before the orientation is applied, pixels.
    width: width before the orientation is applied, pixels.
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
  height_at: int
  ordinary: bool
  one_scan: bool
  block_height: int
  orientation: int


def is_jpeg(data: bytes) -> bool:
  """Returns whether the data starts with a JPEG signature."""
  return data[:2] == b'\xff\xd8'


def jpeg(data: bytes) -> Jpeg:
  """Reads a JPEG's segments up to the first scan.

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
    if marker == 0xFF or marker == 0 or marker in _BARE:
      at += 1 if marker == 0xFF else 2
      continue
    if marker in (_SCAN, _END):
      break
    if marker in _FRAMES and frame is None:
      frame = at
    elif marker == _EXIF and data[at + 4 : at + 10] == b'Exif\0\0':
      orientation = exif_orientation(data[at + 10 :])
    at += 2 + int.from_bytes(data[at + 2 : at + 4], 'big')
  if marker == _END or frame is None or len(data) < frame + 10:
    raise DecodeError('the JPEG file does not contain an image')
  if data.rfind(b'\xff\xd9', at) < 0:
    raise DecodeError('the JPEG file is truncated: it has no end marker')
  bits, height, width, colors = struct.unpack_from('>BHHB', data, frame + 4)
  kind = data[frame + 1]
  # For each colour: its number, horizontal and vertical sampling factor (4 bits
  # each), and its quantization table.
  samples = data[frame + 11 : frame + 10 + 3 * colors : 3]
  return Jpeg(
    height,
    width,
    height_at=frame + 5,
    ordinary=kind in _ORDINARY and bits == 8 and colors in (1, 3),
    one_scan=kind != _PROGRESSIVE and data[at + 4 : at + 5] == bytes([colors]),
    block_height=8 * max([1, *(number & 15 for number in samples)]),
    orientation=orientation,
  )


def without_applications(data: bytes) -> bytes:
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


def exif_orientation(tiff: bytes) -> int:
  """Returns the orientation in EXIF's TIFF structure, 1 to 8; 1 if absent."""
  value = _tiff_tags(tiff).get(_ORIENTATION, 1)
  return value if 1 <= value <= 8 else 1


def _tiff_tags(tiff: bytes) -> dict[int, int]:
  """Returns the first value of each tag in a TIFF's first directory."""
  if tiff[:2] not in (b'II', b'MM'):
    return {}

  def number(start: int, size: int) -> int:
    order = 'little' if tiff[:1] == b'I' else 'big'
    return int.from_bytes(tiff[start : start + size], order)

  big = number(2, 2) == 43
  # Sizes in bytes: an offset, the number of entries, an entry, the part of an
  # entry that precedes its value.
  offset, count, entry, before = (8, 8, 20, 12) if big else (4, 2, 12, 8)
  first, tags = number(offset, offset), {}
  for i in range(number(first, count)):
    at = first + count + entry * i
    if at + entry > len(tiff):
      break
    size = {_SHORT: 2, _LONG: 4}.get(number(at + 2, 2))
    if size:
      tags.setdefault(number(at, 2), number(at + before, size))
  return tags


def stated_size(data: bytes) -> tuple[int, int]:
  """Returns (height, width) in the header of a file that is not a JPEG.

  Returns:
    Size of a PNG, GIF, BMP, WebP or TIFF image, pixels.

  Raises:
    DecodeError: the header is truncated or of another format.
  """
  if len(data) < 30:
    raise DecodeError(f'{len(data)} bytes are too few for an image file')
  if data[:8] == b'\x89PNG\r\n\x1a\n':
    width, height = struct.unpack_from('>II', data, 16)
  elif data[:6] in (b'GIF87a', b'GIF89a'):
    width, height = struct.unpack_from('<HH', data, 6)
  elif data[:2] == b'BM':
    core_header = int.from_bytes(data[14:18], 'little') == 12  # of OS/2
    layout = '<HH' if core_header else '<ii'
    width, height = struct.unpack_from(layout, data, 18)
  elif data[:4] == b'RIFF' and data[8:15] == b'WEBPVP8':
    return _webp_size(data)
  elif data[:4] in _TIFF:
    tags = _tiff_tags(data)
    width, height = tags.get(_WIDTH, 0), tags.get(_HEIGHT, 0)
  else:
    raise DecodeError('not a JPEG, PNG, GIF, BMP, WebP or TIFF file')
  return abs(height), width  # a BMP's height is negative if stored top-down


def _webp_size(data: bytes) -> tuple[int, int]:
  """Reads the size of a WebP image: extended, lossless or lossy."""
  if data[15:16] == b'X':
    width, height = data[24:27], data[27:30]
    return (
      int.from_bytes(height, 'little') + 1,
      int.from_bytes(width, 'little') + 1,
    )
  if data[15:16] == b'L':
    bits = int.from_bytes(data[21:25], 'little')
    return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
  width, height = struct.unpack_from('<HH', data, 26)
  return height & 0x3FFF, width & 0x3FFF
