"""Decodes only a box of a JPEG file, by libjpeg-turbo 3.

The library is loaded from the system or from the package `turbojpeg`. It is
optional: without it, `images/jpeg.py` also decodes the rows above the box,
which gives the same pixels but takes longer.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
import pathlib
import threading
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

# Constants of turbojpeg.h: TJINIT_DECOMPRESS, TJPARAM_SUBSAMP, TJPF_RGB,
# TJERR_FATAL; and the width of a coded block for each chroma subsampling.
_DECOMPRESS, _SUBSAMPLING, _RGB, _FATAL = 1, 4, 0, 1
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
# Chroma upsampling interpolates between neighbours. Without these columns and
# rows, pixels at the edges of a box would differ from those of the whole image.
_EXTRA_COLUMNS, _EXTRA_ROWS = 4, 2


class _Region(ctypes.Structure):
  _fields_ = [(name, ctypes.c_int) for name in ('x', 'y', 'width', 'height')]


class _ScalingFactor(ctypes.Structure):
  _fields_ = [(name, ctypes.c_int) for name in ('numerator', 'denominator')]


class Decoded(NamedTuple):
  """Decoded box of a JPEG file.

  Attributes:
    pixels: RGB pixels of the box.
    warning: first warning of libjpeg, or ''.
  """

  pixels: UInt8[np.ndarray, 'y x 3']
  warning: str


def decode_box(
  data: bytes,
  height: int,
  width: int,
  box: tuple[int, int, int, int],
  shrink: int = 1,
) -> Decoded | None:
  """Decodes a box of a baseline or progressive JPEG to RGB.

  Args:
    data: content of the file.
    height: height of the decoded image, pixels.
    width: width of the decoded image, pixels.
    box: (y, x, height, width) in the decoded image, pixels.
    shrink: ratio of the size in the header to the size of the decoded image:
      1, 2, 4 or 8.

  Returns:
    Pixels of the box, equal to those that decoding the whole image gives; None
    if the library is not installed or cannot decode the file.
  """
  library = _library()
  if library is None:
    return None
  handle = _handle(library)
  if library.tj3DecompressHeader(handle, data, len(data)):
    return None
  subsampling = library.tj3Get(handle, _SUBSAMPLING)
  if not 0 <= subsampling < len(_BLOCK_WIDTHS):
    return None
  y, x, rows, columns = box
  if library.tj3SetScalingFactor(handle, _ScalingFactor(1, shrink)):
    return None
  block = _BLOCK_WIDTHS[subsampling] // shrink
  left = max(x - _EXTRA_COLUMNS, 0) // block * block
  right = min(x + columns + _EXTRA_COLUMNS, width)
  top = max(y - _EXTRA_ROWS, 0)
  # The region extends to the last row, so that libjpeg checks all of the data.
  region = _Region(left, top, right - left, height - top)
  if library.tj3SetCroppingRegion(handle, region):
    return None
  pixels = np.empty((height - top, right - left, 3), np.uint8)
  failed = library.tj3Decompress8(
    handle, data, len(data), pixels.ctypes.data, 0, _RGB
  )
  if failed and library.tj3GetErrorCode(handle) == _FATAL:
    return None
  warning = library.tj3GetErrorStr(handle).decode() if failed else ''
  return Decoded(
    pixels[y - top : y - top + rows, x - left : x - left + columns], warning
  )


@functools.cache
def _library() -> Any:
  """Loads the library; returns None if no suitable version is installed."""
  for path in _paths():
    try:
      library = ctypes.CDLL(path)
      library.tj3Init.restype = ctypes.c_void_p
      handle, size = ctypes.c_void_p, ctypes.c_size_t
      for name, arguments in {
        'tj3Init': [ctypes.c_int],
        'tj3Destroy': [handle],
        'tj3DecompressHeader': [handle, ctypes.c_char_p, size],
        'tj3Get': [handle, ctypes.c_int],
        'tj3SetScalingFactor': [handle, _ScalingFactor],
        'tj3SetCroppingRegion': [handle, _Region],
        'tj3Decompress8': [
          handle,
          ctypes.c_char_p,
          size,
          ctypes.c_void_p,
          ctypes.c_int,
          ctypes.c_int,
        ],
        'tj3GetErrorCode': [handle],
        'tj3GetErrorStr': [handle],
      }.items():
        getattr(library, name).argtypes = arguments
      library.tj3GetErrorStr.restype = ctypes.c_char_p
      return library
    except (OSError, AttributeError):  # not a library, or an older version
      continue
  return None


def _paths() -> list[str]:
  system = ctypes.util.find_library('turbojpeg')
  paths = [system] if system else []
  package = importlib.util.find_spec('turbojpeg')
  if package is not None and package.origin:
    folder = pathlib.Path(package.origin).parent / 'turbojpeg.libs'
    paths += map(str, sorted(folder.glob('libturbojpeg*')))
  return paths


_local = threading.local()  # a decompressor must not be shared by threads


class _Decompressor:
  """A decompressor, whose memory is freed when its thread ends."""

  def __init__(self, library: Any):
    self._destroy = library.tj3Destroy
    self.handle = library.tj3Init(_DECOMPRESS)

  def __del__(self):
    self._destroy(self.handle)


def _handle(library: Any) -> Any:
  if not hasattr(_local, 'decompressor'):
    _local.decompressor = _Decompressor(library)
  return _local.decompressor.handle
