"""Tests of sizes and orientations in headers, and decompression bombs."""

import io
import struct

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sample_images import encode, noise

from tests.faults.counts import injected
from vit_jax.data.images import decode as decoding
from vit_jax.data.images import headers
from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError


def saved(kind, height, width, **settings):
  file = io.BytesIO()
  image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
  image.save(file, kind, **settings)
  return file.getvalue()


SIZES = [(1, 1), (3, 700), (300, 2)]


@pytest.mark.parametrize('height, width', SIZES)
@pytest.mark.parametrize(
  'kind, settings',
  [
    ('PNG', {}),
    ('GIF', {}),
    ('BMP', {}),
    ('WEBP', {}),
    ('TIFF', {}),
    ('TIFF', {'big_tiff': True}),
    ('WEBP', {'lossless': True}),
    ('WEBP', {'exif': b'Exif\0\0II*\0\x08\0\0\0\0\0'}),  # with features
  ],
)
def test_stated_size_of_each_format(kind, settings, height, width):
  """Heights and widths are read correctly, also for one pixel."""
  data = saved(kind, height, width, **settings)
  if kind != 'TIFF':
    assert headers.stated_size(data) == (height, width)
  assert decode(data).shape == (height, width, 3)


def changed(kind, offset, form, *sizes):
  """Returns a few bytes whose header states other sizes."""
  data = bytearray(saved(kind, 8, 8))
  struct.pack_into(form, data, offset, *sizes)
  return bytes(data)


def png_bomb(side):
  return changed('PNG', 16, '>II', side, side)


def jpeg_bomb(side):
  at = headers.jpeg(saved('JPEG', 8, 8)).height_at
  return changed('JPEG', at, '>HH', side, side)


def gif_bomb(side):
  return changed('GIF', 6, '<HH', side, side)


def bmp_bomb(side):
  return changed('BMP', 18, '<ii', side, -side)  # stored top-down


def webp_bomb(side):
  side = (side - 1).to_bytes(3, 'little')
  start = b'RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0'
  return start + 2 * side + bytes(20)


def tiff_bomb(side):
  data = saved('TIFF', 1, 1)
  for tag in (256, 257):  # a tag, its type (LONG), count and value
    entry = struct.pack('<HHI', tag, 4, 1)
    assert data.count(entry) == 1
    at = data.index(entry) + len(entry)
    data = data[:at] + struct.pack('<I', side) + data[at + 4 :]
  return data


BOMBS = [png_bomb, jpeg_bomb, gif_bomb, bmp_bomb, webp_bomb, tiff_bomb]


@pytest.mark.parametrize('bomb', BOMBS)
def test_bombs_are_not_decoded(bomb, monkeypatch):
  """A small file that states 60,000 x 60,000 pixels is not decoded."""

  def explode(*_, **__):
    raise AssertionError('decoded')

  injected('a decompression bomb')
  monkeypatch.setattr(cv2, 'imdecode', explode)
  monkeypatch.setattr(simplejpeg, 'decode_jpeg', explode)
  with pytest.raises(DecodeError, match='pixels'):
    decode(bomb(60_000))


@pytest.mark.parametrize('kind', ['.png', '.jpg'])
def test_the_limit_is_exact(kind, monkeypatch):
  """MAX_PIXELS pixels are decoded, one pixel more is refused."""
  data = encode(noise(10, 20), kind)
  monkeypatch.setattr(decoding, 'MAX_PIXELS', 200)
  assert decode(data).shape == (10, 20, 3)
  monkeypatch.setattr(decoding, 'MAX_PIXELS', 199)
  with pytest.raises(DecodeError, match='20 x 10'):
    decode(data)


def tiff(order, *entries):
  """Returns EXIF's TIFF structure with entries (tag, value)."""
  mark = b'II*\0' if order == '<' else b'MM\0*'
  data = mark + struct.pack(order + 'IH', 8, len(entries))
  for tag, value in entries:
    data += struct.pack(order + 'HHIHH', tag, 3, 1, value, 0)
  return data + bytes(4)  # no other directory


@pytest.mark.parametrize(
  'data',
  [
    b'',
    b'II',
    b'garbage',
    tiff('<'),
    tiff('<', (0x0100, 6)),
    tiff('<', (0x0112, 0)),
    tiff('>', (0x0112, 9)),
    tiff('<', (0x0112, 6))[:-8],
    b'II*\0\xff\xff\xff\xff\xff\xff',
    b'II*\0\x08\0\0\0\xff\xff',
  ],
)
@pytest.mark.filterwarnings('ignore:Corrupt EXIF data')
def test_broken_exif_is_upright(data):
  """Without a valid orientation, the image is upright."""
  assert headers.exif_orientation(data) == 1
