"""TIFF files: kinds that are decoded or refused, and bombs."""

import io
import struct
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest
import tifffile
from sample_images import noise, smooth

from tests.faults.counts import injected
from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError

RGB = smooth(96, 128)
GREY = RGB[..., 0]
OPACITY = noise(96, 128, 1)
RGBA = np.concatenate([RGB, OPACITY], axis=2)


def tiff(pixels, photometric='rgb', **keys):
  file = io.BytesIO()
  tifffile.imwrite(file, pixels, photometric=photometric, **keys)
  return file.getvalue()


def in_planes(pixels, photometric='rgb'):
  planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
  keys = dict(planarconfig='separate', extrasamples=['unassalpha'])
  return tiff(planes, photometric, **keys)


@pytest.mark.parametrize('order', ['<', '>'])
@pytest.mark.parametrize('alpha', ['unassalpha', 'assocalpha', 'unspecified'])
@pytest.mark.parametrize('bits', [8, 16])
@pytest.mark.parametrize('tile', [None, (16, 16), (32, 32)])
def test_colours_remain_where_they_are_transparent(order, alpha, bits, tile):
  """The colours are those stored, for each kind of opacity and layout."""
  pixels = RGBA if bits == 8 else RGBA.astype(np.uint16) * 257
  data = tiff(pixels, extrasamples=[alpha], tile=tile, byteorder=order)
  np.testing.assert_array_equal(decode(data), RGB)


def test_opacity_in_planes_and_of_grey():
  """Planes and grey images are decoded like interleaved colours."""
  np.testing.assert_array_equal(decode(in_planes(RGBA)), RGB)
  for dtype, scale in ((np.uint8, 1), (np.uint16, 257)):
    grey = np.dstack([GREY, OPACITY]).astype(dtype) * scale
    keys = dict(planarconfig='contig', extrasamples=['unassalpha'])
    data = tiff(grey.astype(dtype), 'minisblack', **keys)
    np.testing.assert_array_equal(decode(data)[..., 1], GREY)


KINDS = {
  ', int8,': tiff(GREY.astype(np.int8), 'minisblack'),
  ', uint32,': tiff(GREY.astype(np.uint32), 'minisblack'),
  ', float32,': tiff(GREY.astype(np.float32), 'minisblack'),
  'CIELAB': tiff(RGB, 'cielab'),
  '.SEPARATED., 16 bits': tiff(RGBA.astype(np.uint16), 'separated'),
  '2 samples per pixel .MINISWHITE': in_planes(RGB[..., :2], 'miniswhite'),
  '3 samples per pixel .MINISBLACK': tiff(
    RGB, 'minisblack', planarconfig='contig'
  ),
  '5 samples per pixel .RGB': tiff(np.dstack([RGBA, OPACITY])),
  'tiles of 768 bytes': tiff(RGB, tile=(16, 16)),
  'compression LZMA': tiff(RGB, compression='lzma'),
}


@pytest.mark.parametrize('name', KINDS)
def test_other_kinds_are_named(name):
  """A valid file is not called damaged, and the message names its kind."""
  with pytest.raises(DecodeError, match=rf'a TIFF of .*{name}') as caught:
    decode(KINDS[name])
  assert 'damaged' not in str(caught.value)
  assert 'supported are' in str(caught.value)


@pytest.mark.parametrize('fraction', [0.001, 0.05, 0.5, 0.95])
def test_truncated_files_are_refused(fraction):
  """A file of strips whose last strips are missing is not decoded."""
  data = tiff(RGBA, extrasamples=['unassalpha'], rowsperstrip=8)
  with pytest.raises(DecodeError):
    decode(data[: int(fraction * len(data))])


def unpacking_to(size, side, pages=1, tile=None, samples=3):
  """Returns a TIFF file whose compressed strip or tile unpacks to a size.

  Args:
    size: size of the unpacked data, bytes.
    side: width and height in the tags.
    pages: number of pages, which have the same data.
    tile: width and height of the tile; None for a strip.
    samples: number of samples per pixel.
  """
  packer = zlib.compressobj(9)
  body = packer.compress(bytes(size)) + packer.flush()
  color = 2 if samples == 3 else 1  # RGB, or grey
  tags = {256: side, 257: side, 258: 8, 259: 8, 262: color, 277: samples}
  if tile:
    tags |= {322: tile, 323: tile, 324: 8, 325: len(body)}
  else:
    tags |= {273: 8, 278: side, 279: len(body)}
  tags = dict(sorted(tags.items()))
  data = b'II*\0' + struct.pack('<I', 8 + len(body)) + body
  for page in range(pages):
    data += struct.pack('<H', len(tags))
    for tag, value in tags.items():
      data += struct.pack('<HHII', tag, 4, 1, value)
    data += struct.pack('<I', 0 if page == pages - 1 else len(data) + 4)
  return data


@pytest.mark.parametrize(
  'keys, channels',
  [
    (dict(side=16, samples=4), 4),
    (dict(side=16, tile=16, samples=4), 4),
    (dict(side=16, pages=2, samples=1), 2),
  ],
)
def test_bombs_are_not_unpacked(keys, channels):
  """The unpacked size of a strip is compared with that in the tags."""
  injected('a decompression bomb')
  data = unpacking_to(2**28, **keys)
  tracemalloc.start()
  with pytest.raises(DecodeError, match='unpacks to more than'):
    decode(data, channels)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2**23


@pytest.mark.parametrize('channels', [3, 4])
def test_huge_tiles_are_not_decoded(channels, monkeypatch):
  """The size of a tile is limited like that of an image."""
  injected('a decompression bomb')
  monkeypatch.setattr(cv2, 'imdecode', None)
  data = unpacking_to(100, side=16, tile=2**14, samples=channels)
  with pytest.raises(DecodeError, match='16384 x 16384|1073741824 bytes'):
    decode(data, channels)
