"""Reads TIFF files: the kind of image from the tags, then its pixels.

OpenCV decodes pictures to RGB, and tifffile other images to their channels
(`channels.py`). Both return other pictures for some kinds, or allocate more
memory than the image has, and are therefore given only files whose tags have
been checked here.
"""

import contextlib
import importlib.util
import io
import lzma
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cv2
import numpy as np
import tifffile
from jaxtyping import UInt8

from vit_jax.data.images import jpeg
from vit_jax.data.images.headers import DecodeError

_SIGNATURES = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')  # the last two: BigTIFF
_UNSIGNED = (1, 4)  # values of SampleFormat: unsigned integers, and undefined
_ANY_BITS = (1, 8, 16)
# PhotometricInterpretation: number of samples per pixel without and with
# opacity, and allowed bits per sample.
_COLORS = {
  0: (1, 2, _ANY_BITS),  # grey, white is 0
  1: (1, 2, _ANY_BITS),  # grey, black is 0
  2: (3, 4, (8, 16)),  # RGB
  3: (1, 2, (1, 8)),  # palette
  5: (4, 4, (8,)),  # CMYK
  6: (3, 3, (8,)),  # YCbCr
}
_BLACK_IS_ZERO = 1
_INTERLEAVED = 1  # kind of PlanarConfiguration
# None, CCITT (3), LZW, JPEG, deflate (2), PackBits.
_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32946, 32773)
_EXTRA_SAMPLES = 338  # tag
_ASSOCIATED, _UNASSOCIATED = 1, 2  # kinds of alpha in this tag
# libtiff refuses uncompressed tiles of other sizes, although they are valid.
_TILE_BYTES = 1024
# Codecs that tifffile applies without a limit if imagecodecs is not installed.
_UNPACKERS: dict[int, Callable[[], Any]] = {
  8: zlib.decompressobj,
  32946: zlib.decompressobj,
  34925: lzma.LZMADecompressor,
}
_SUPPORTED = (
  'unsigned samples of 8 bits (grey and palettes also 1, grey and RGB also 16) '
  'in grey, RGB, palettes, CMYK and YCbCr; no compression, LZW, deflate, JPEG, '
  f'PackBits and CCITT; strips, and tiles of a multiple of {_TILE_BYTES} bytes'
)
# imagecodecs does not unpack more than the size in the tags.
_CODECS_ARE_LIMITED = importlib.util.find_spec('imagecodecs') is not None


def is_tiff(data: bytes) -> bool:
  """Returns whether the data starts with a TIFF signature."""
  return data[:4] in _SIGNATURES


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[tifffile.TiffFile]:
  """Opens a file; errors within the context become DecodeErrors."""
  try:
    # The metadata of OME-TIFF could name other files.
    with tifffile.TiffFile(io.BytesIO(data), is_ome=False) as file:
      yield file
  except DecodeError:
    raise
  except Exception as error:  # noqa: BLE001 (damaged files raise many kinds)
    raise DecodeError(f'the TIFF file cannot be used: {error}') from error


def rgb(
  data: bytes, check_size: Callable[[int, int], None]
) -> UInt8[np.ndarray, 'y x 3']:
  """Decodes the first page to upright RGB pixels; transparency is dropped.

  Args:
    data: content of the file.
    check_size: function of a height and a width, pixels, which raises a
      DecodeError if they are too large.

  Raises:
    DecodeError: the file is of another kind, too large, damaged or truncated.
  """
  with opened(data) as file:
    page: Any = file.pages.first
    check_size(page.imagelength, page.imagewidth)
    if page.is_tiled:
      check_size(page.tilelength, page.tilewidth)
    _check_kind(page)
    if _UNASSOCIATED in page.extrasamples:
      data = _with_associated_alpha(data, page)
  return jpeg.opencv(data, cv2.IMREAD_COLOR_RGB)


def check_segments(data: bytes, pages: Sequence[Any], max_bytes: int) -> None:
  """Checks that no strip or tile unpacks to more than its size in the tags.

  Args:
    data: content of the file.
    pages: pages that will be decoded by tifffile.
    max_bytes: limit of the size in the tags.

  Raises:
    DecodeError: a strip or tile is larger, or cannot be unpacked.
  """
  page = pages[0].keyframe
  size = math.prod(page.chunks) * page.dtype.itemsize
  if size > max_bytes:
    raise DecodeError(
      f'a strip or tile of the TIFF file has {size} bytes; at most: {max_bytes}'
    )
  unpacker = _UNPACKERS.get(page.compression)
  if unpacker is None or _CODECS_ARE_LIMITED:
    return
  for each in pages:
    for at, count in zip(each.dataoffsets, each.databytecounts, strict=True):
      # One byte more than allowed is enough to detect a bomb.
      unpacked = unpacker().decompress(data[at : at + count], size + 1)
      if len(unpacked) > size:
        raise DecodeError(
          f'a strip or tile of the TIFF file unpacks to more than {size} bytes'
        )


def _check_kind(page: Any) -> None:
  """Checks that OpenCV decodes a page to the same picture as other readers."""
  samples, with_opacity, bits = _COLORS.get(page.photometric, (0, 0, ()))
  # `bitspersample` is a tuple if the samples differ.
  tile = math.prod(page.chunks) * int(np.max(page.bitspersample)) // 8
  if (
    page.sampleformat not in _UNSIGNED
    or page.bitspersample not in bits
    or not samples <= page.samplesperpixel <= with_opacity
    # With opacity in its own plane, OpenCV takes 0 for black, even if it is
    # white.
    or (
      page.planarconfig != _INTERLEAVED
      and page.samplesperpixel == 2
      and page.photometric != _BLACK_IS_ZERO
    )
    or page.compression not in _COMPRESSIONS
    or (page.is_tiled and page.compression == 1 and tile % _TILE_BYTES)
  ):
    color, packing = (
      getattr(value, 'name', str(value))
      for value in (page.photometric, page.compression)
    )
    raise DecodeError(
      f'a TIFF of {page.samplesperpixel} samples per pixel ({color}), '
      f'{page.bitspersample} bits, {page.dtype}, compression {packing}, tiles '
      f'of {tile} bytes; supported are {_SUPPORTED}: convert the file, or set '
      'the config keys channels and bits'
    )


def _with_associated_alpha(data: bytes, page: Any) -> bytes:
  """Returns a file in whose tags the alpha is associated with the colours.

  libtiff multiplies colours by unassociated alpha, so that they would be black
  where they are transparent. It returns associated ones as stored.
  """
  values = [
    _ASSOCIATED if value == _UNASSOCIATED else value
    for value in page.extrasamples
  ]
  at = page.tags[_EXTRA_SAMPLES].valueoffset
  tag = struct.pack(f'{page.parent.byteorder}{len(values)}H', *values)
  return data[:at] + tag + data[at + len(tag) :]
