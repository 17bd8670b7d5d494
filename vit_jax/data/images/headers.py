"""What an encoded image says of itself before anything is decoded."""

import struct
from typing import NamedTuple

# JPEG markers, the byte after 0xFF.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})  # without a segment
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END, _EXIF = 0xDA, 0xD9, 0xE1
_APPLICATIONS = range(0xE0, 0xF0)
_PROGRESSIVE = 0xC2
_ORDINARY = (0xC0, 0xC1, _PROGRESSIVE)  # baseline, extended


# Tags of TIFF, and so of EXIF; the types of numbers of 2 and 4 bytes.
_WIDTH, _HEIGHT, _ORIENTATION = 256, 257, 274
_SHORT, _LONG = 3, 4
_TIFF = (b'II*\0', b'II+\0', b'MM\0*', b'MM\0+')


class DecodeError(ValueError):
  """An image that cannot be decoded."""


class Jpeg(NamedTuple):
  """The header of a JPEG file.

  Attributes:
    height: as stored, pixels.
    width: as stored, pixels.
    height_at: position of the height in the file (two bytes).
    ordinary: Huffman-coded 8-bit greyscale or three colours.
    one_scan: all colours come together, from the top down.
    block_height: height of the coded blocks that belong together, pixels.
    orientation: EXIF's, 1 (upright) to 8; from 5 on the sides are swapped.
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
    DecodeError: no frame, or the file ends before its end marker. (Entropy
      coded data cannot contain that marker, and decoders that miss it paint
      what is missing grey.)
  """
  at, orientation, frame = 2, 1, None
  while True:
    at = data.find(b'\xff', at)
    if at < 0 or at + 4 > len(data):
      raise DecodeError('cut short in its header')
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
    raise DecodeError('a JPEG without a picture')
  if data.rfind(b'\xff\xd9', at) < 0:
    raise DecodeError('cut short: a JPEG without its end marker')
  bits, height, width, colors = struct.unpack_from('>BHHB', data, frame + 4)
  kind = data[frame + 1]
  # Each colour: its number, its samples across and down (4 bits each), a table.
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

  Decoders may emit warnings about these.
  """
  parts, at = [data[:2]], 2
  while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
    stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], 'big')
    if data[at + 1] not in _APPLICATIONS:
      parts.append(data[at:stop])
    at = stop
  return b''.join([*parts, data[at:]])


def exif_orientation(tiff: bytes) -> int:
  """Returns the orientation in EXIF's TIFF structure: 1 to 8; 1 if absent."""
  value = _tiff_tags(tiff).get(_ORIENTATION, 1)
  return value if 1 <= value <= 8 else 1


def _tiff_tags(tiff: bytes) -> dict[int, int]:
  """Reads the first directory of a TIFF or BigTIFF: first value of each tag."""
  if tiff[:2] not in (b'II', b'MM'):
    return {}

  def number(start: int, size: int) -> int:
    order = 'little' if tiff[:1] == b'I' else 'big'
    return int.from_bytes(tiff[start : start + size], order)

  big = number(2, 2) == 43
  # Bytes of: an offset, the number of entries, an entry, what is before its
  # value.
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
  """(height, width) of a PNG, GIF, BMP, WebP or TIFF file, as stored, pixels.

  Raises:
    DecodeError: cut short in its header, or no file of these formats.
  """
  if len(data) < 30:
    raise DecodeError('too short for an image')
  if data[:8] == b'\x89PNG\r\n\x1a\n':
    width, height = struct.unpack_from('>II', data, 16)
  elif data[:6] in (b'GIF87a', b'GIF89a'):
    width, height = struct.unpack_from('<HH', data, 6)
  elif data[:2] == b'BM':
    old = int.from_bytes(data[14:18], 'little') == 12
    width, height = struct.unpack_from('<HH' if old else '<ii', data, 18)
  elif data[:4] == b'RIFF' and data[8:15] == b'WEBPVP8':
    return _webp_size(data)
  elif data[:4] in _TIFF:
    tags = _tiff_tags(data)
    width, height = tags.get(_WIDTH, 0), tags.get(_HEIGHT, 0)
  else:
    raise DecodeError('not a JPEG, PNG, GIF, BMP, WebP or TIFF file')
  return abs(height), width  # a negative height: stored from the top down


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
