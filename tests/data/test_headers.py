"""Tests of sizes and orientations in headers, and decompression bombs."""

import struct

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image
from pillow_files import saved
from sample_images import encode, noise

from tests.faults.counts import injected
from vit_jax.data.images import decode as decoding
from vit_jax.data.images import headers
from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError


def black(kind, height, width, **settings):
  image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
  return saved(image, kind, **settings)


@pytest.mark.parametrize('height, width', [(1, 1), (3, 700), (300, 2)])
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
  data = black(kind, height, width, **settings)
  if kind != 'TIFF':
    assert headers.stated_size(data) == (height, width)
  assert decode(data).shape == (height, width, 3)


def stating(side, kind):
  """Returns a few bytes whose header states a square of that side, pixels."""
  data = black(kind, 8, 8)
  places = {  # offset, and the format of the height and width
    'PNG': (16, '>II'),
    'GIF': (6, '<HH'),
    'BMP': (18, '<ii'),
  }
  if kind == 'JPEG':
    places[kind] = headers.jpeg(data).height_at, '>HH'
  if kind == 'WEBP':
    size = (side - 1).to_bytes(3, 'little')
    return b'RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0' + 2 * size + bytes(20)
  if kind == 'TIFF':
    for tag in (256, 257):  # a tag, its type (LONG), count and value
      entry = struct.pack('<HHI', tag, 4, 1)
      assert data.count(entry) == 1
      at = data.index(entry) + len(entry)
      data = data[:at] + struct.pack('<I', side) + data[at + 4 :]
    return data
  changed, (offset, form) = bytearray(data), places[kind]
  height = -side if kind == 'BMP' else side  # BMP: stored top-down
  struct.pack_into(form, changed, offset, side, height)
  return bytes(changed)


@pytest.mark.parametrize('kind', ['PNG', 'JPEG', 'GIF', 'BMP', 'WEBP', 'TIFF'])
def test_bombs_are_not_decoded(kind, monkeypatch):
  """A small file that states 60,000 x 60,000 pixels is not decoded."""

  def explode(*_, **__):
    raise AssertionError('decoded')

  injected('a decompression bomb')
  monkeypatch.setattr(cv2, 'imdecode', explode)
  monkeypatch.setattr(simplejpeg, 'decode_jpeg', explode)
  with pytest.raises(DecodeError, match='pixels'):
    decode(stating(60_000, kind))


@pytest.mark.parametrize('kind', ['.png', '.jpg'])
def test_the_limit_is_exact(kind, monkeypatch):
  """MAX_PIXELS pixels are decoded, one pixel more is refused."""
  data = encode(noise(10, 20), kind)
  monkeypatch.setattr(decoding, 'MAX_PIXELS', 200)
  assert decode(data).shape == (10, 20, 3)
  monkeypatch.setattr(decoding, 'MAX_PIXELS', 199)
  with pytest.raises(DecodeError, match='20 x 10'):
    decode(data)


def exif(order, *entries):
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
    b'garbage',
    exif('<', (0x0100, 6)),
    exif('<', (0x0112, 0)),
    exif('>', (0x0112, 9)),
    exif('<', (0x0112, 6))[:-8],
    b'II*\0\xff\xff\xff\xff\xff\xff',
    b'II*\0\x08\0\0\0\xff\xff',
  ],
)
@pytest.mark.filterwarnings('ignore:Corrupt EXIF data')
def test_without_a_valid_orientation_an_image_is_upright(data):
  assert headers.exif_orientation(data) == 1
