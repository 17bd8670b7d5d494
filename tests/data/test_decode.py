"""Tests of decoding each format against Pillow, and of resizing."""

import re
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image
from pillow_files import opened, saved, turned
from sample_images import encode, noise, smooth

from vit_jax.data.images import headers
from vit_jax.data.images.decode import INTERPOLATIONS, decode, resize
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import files


@pytest.mark.parametrize('channels', [None, 1, 3])
def test_arrays_are_only_broadcast_to_three_channels(channels):
  pixels = noise(5, 6, channels)
  expected = np.broadcast_to(np.atleast_3d(pixels), (5, 6, 3))
  np.testing.assert_array_equal(decode(pixels), expected)


@pytest.mark.parametrize(
  'image',
  [
    np.zeros((4, 4, 3), np.float32),
    np.zeros(4, np.uint8),
    np.zeros((1, 4, 4, 3), np.uint8),
    np.zeros((4, 4, 4), np.uint8),
    np.zeros((0, 4, 3), np.uint8),
    b'not an image',
    b'\xff\xd8\xff\xe0',
  ],
)
def test_wrong_images_are_refused(image):
  with pytest.raises(DecodeError):
    decode(image)


PLAIN = Image.fromarray(smooth(40, 60))
EXACT = {
  'PNG': (PLAIN, 'PNG', {}),
  'greyscale': (PLAIN.convert('L'), 'PNG', {}),
  'one bit': (PLAIN.convert('1'), 'PNG', {}),
  'palette': (PLAIN.quantize(50), 'PNG', {}),
  'GIF': (PLAIN.quantize(50), 'GIF', {}),
  'GIF transparent': (PLAIN.quantize(50), 'GIF', {'transparency': 3}),
  'BMP': (PLAIN, 'BMP', {}),
  'BMP palette': (PLAIN.quantize(50), 'BMP', {}),
  'TIFF': (PLAIN, 'TIFF', {}),
  'TIFF LZW': (PLAIN, 'TIFF', {'compression': 'tiff_lzw'}),
  'TIFF deflate': (PLAIN, 'TIFF', {'compression': 'tiff_deflate'}),
  'TIFF palette': (PLAIN.quantize(50), 'TIFF', {}),
  'TIFF one bit': (PLAIN.convert('1'), 'TIFF', {'compression': 'group4'}),
  'BigTIFF': (PLAIN, 'TIFF', {'big_tiff': True}),
  'WebP': (PLAIN, 'WEBP', {}),
  'WebP lossless': (PLAIN, 'WEBP', {'lossless': True}),
  'JPEG': (PLAIN, 'JPEG', {}),
  'JPEG greyscale': (PLAIN.convert('L'), 'JPEG', {}),
  'JPEG progressive': (PLAIN, 'JPEG', {'progressive': True}),
  'JPEG 4:4:4': (PLAIN, 'JPEG', {'subsampling': '4:4:4'}),
}


@pytest.mark.parametrize('name', EXACT)
def test_decoded_pixels_equal_pillow(name):
  image, kind, settings = EXACT[name]
  data = saved(image, kind, **settings)
  np.testing.assert_array_equal(decode(data), opened(data))


def test_cmyk_jpeg_is_converted_to_rgb():
  """The difference from Pillow is at most two levels."""
  y, x = np.mgrid[:40, :60]
  inks = np.stack([2 * x, 2 * y, 100 + x, 3 * y], -1).astype(np.uint8)
  data = saved(Image.fromarray(inks, 'CMYK'), 'JPEG', quality=95)
  difference = np.abs(decode(data).astype(int) - opened(data))
  assert difference.max() <= 2


@pytest.mark.parametrize('kind', ['.png', '.tiff'])
@pytest.mark.parametrize('shape', [(9, 7), (9, 7, 3)])
def test_sixteen_bits_keep_the_upper_eight(shape, kind):
  """The value 65535 becomes 255, and 255 becomes 0."""
  pixels = np.random.default_rng(0).integers(0, 2**16, shape).astype(np.uint16)
  expected = np.broadcast_to(np.atleast_3d(pixels) >> 8, (9, 7, 3))
  # libtiff rounds the values of three channels.
  atol = 1 if kind == '.tiff' else 0
  decoded = decode(encode(pixels, kind)).astype(int)
  np.testing.assert_allclose(decoded, expected, rtol=0, atol=atol)


@pytest.mark.parametrize('kind', ['PNG', 'WEBP', 'TIFF'])
def test_transparency_is_dropped(kind):
  """Colours remain as stored, whatever the opacity."""
  colors, opacity = noise(9, 7), noise(9, 7, 1)
  image = Image.fromarray(np.concatenate([colors, opacity], -1), 'RGBA')
  settings = {'lossless': True, 'exact': True} if kind == 'WEBP' else {}
  data = saved(image, kind, **settings)
  np.testing.assert_array_equal(decode(data), colors)


@pytest.mark.parametrize('kind', ['GIF', 'WEBP', 'PNG'])
def test_animations_show_their_first_frame(kind):
  frames = [Image.fromarray(np.full((5, 6, 3), v, np.uint8)) for v in (9, 200)]
  data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
  np.testing.assert_allclose(decode(data), 9, atol=1)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'TIFF'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_images_are_upright(kind, orientation):
  data = turned(kind, orientation)
  np.testing.assert_array_equal(decode(data), opened(data))


def test_unknown_formats_are_refused():
  """Formats whose size cannot be read beforehand are not decoded."""
  data = saved(PLAIN, 'PPM')
  assert cv2.imdecode(np.frombuffer(data, np.uint8), 1) is not None
  with pytest.raises(DecodeError, match='JPEG, PNG, GIF, BMP, WebP or TIFF'):
    decode(data)


OTHERS = {
  'AVIF': b'\0\0\0\x20ftypavif\0\0\0\0avifmif1',
  'HEIC': b'\0\0\0\x24ftypheic\0\0\0\0mif1heic',
  'HEIC by Nokia': b'\0\0\0\x24ftypmif1\0\0\0\0mif1heic',
  'video': b'\0\0\0\x18ftypmp42\0\0\0\0',
  'JPEG XL': b'\xff\x0a\xfa\x1f\x41',
  'JPEG XL in a container': b'\0\0\0\x0cJXL \r\n\x87\n',
  'JPEG 2000': b'\0\0\0\x0cjP  \r\n\x87\n',
  'web page': b'\n<!DOCTYPE html><html>404</html>',
  'web page without a type': b'<HTML>404</HTML>',
  'SVG': b'<?xml version="1.0"?>\n<svg width="9"/>',
  'Git LFS pointer': b'version https://git-lfs.github.com/spec/v1\noid sha256:',
  'empty': b'',
  'zero bytes': bytes(4096),
  'PDF': b'%PDF-1.4',
  'archive': b'PK\x03\x04abc',
}


@pytest.mark.parametrize('name', OTHERS)
@pytest.mark.parametrize('channels', [3, 4])
def test_other_formats_are_named(name, channels):
  """The message contains the format and a remedy, and no claim of damage."""
  data = OTHERS[name]
  kind = re.split(' (?:by|in|without) ', name)[0]
  with pytest.raises(DecodeError, match=rf'{kind}.*: \w') as caught:
    decode(data, channels)
  assert 'damaged' not in str(caught.value)


@pytest.mark.parametrize('bits, coding', [(12, 1), (8, 3)])
def test_unusual_jpegs_are_named(bits, coding):
  """12 bits, and lossless coding (SOF3)."""
  data = bytearray(saved(PLAIN, 'JPEG'))
  frame = headers.jpeg(bytes(data)).height_at - 5
  data[frame + 1], data[frame + 4] = 0xC0 + coding, bits
  with pytest.raises(DecodeError, match='must be baseline'):
    decode(bytes(data))


@pytest.mark.parametrize('ending', files.IMAGES)
def test_the_extensions_that_sources_list_are_decoded(ending):
  data = saved(PLAIN, Image.registered_extensions()[ending])
  assert decode(data).shape == (40, 60, 3)


# Resizing

# Checksums of the results of an implementation of the filters in integers.
CHECKSUMS = {'bicubic': 0xB0CABD69, 'bilinear_antialias': 0x56EF162D}


@pytest.mark.parametrize('interpolation', CHECKSUMS)
def test_pillow_filters_are_exact(interpolation):
  """Results are bitwise equal for shrinking, enlarging and both at once."""
  checksum = 0
  for seed in range(25):
    sizes = np.random.default_rng(seed).integers(1, 90, 4).tolist()
    resized = resize(noise(*sizes[:2]), *sizes[2:], interpolation)
    checksum = zlib.crc32(resized.tobytes(), checksum)
  assert checksum == CHECKSUMS[interpolation]


def test_shrinking_by_four():
  """Area averages 4 x 4 pixels; bilinear only the four in their middle."""
  image = noise(12, 20)
  blocks = image.reshape(3, 4, 5, 4, 3)
  area, bilinear = resize(image, 3, 5, 'area'), resize(image, 3, 5)
  assert np.abs(area - blocks.mean(axis=(1, 3))).max() <= 0.5
  middle = blocks[:, 1:3, :, 1:3]
  assert np.abs(bilinear - middle.mean(axis=(1, 3))).max() <= 0.5


@pytest.mark.parametrize('height, width', [(30, 40), (5, 40), (30, 7)])
def test_area_enlarges_smoothly(height, width):
  """Growing axes are bilinear, without blocks; shrinking axes are averaged."""
  image = noise(10, 13)
  resized = resize(image, height, width, 'area').astype(int)
  if height > 10 and width > 13:
    np.testing.assert_array_equal(resized, cv2.resize(image, (width, height)))
  nearest = resize(image, height, width, 'nearest').astype(int)
  for axis in range(2):
    if (height, width)[axis] > image.shape[axis]:
      steps, blocks = (
        np.abs(np.diff(x, axis=axis)).max() for x in (resized, nearest)
      )
      assert steps < blocks


@pytest.mark.parametrize('interpolation', INTERPOLATIONS)
def test_constants_and_sizes_are_preserved(interpolation):
  """Constant images stay constant; images of the same size are unchanged."""
  flat = np.full((7, 31, 3), (0, 100, 255), np.uint8)
  for height, width in [(1, 1), (3, 64), (50, 5)]:
    resized = resize(flat, height, width, interpolation)
    assert resized.shape == (height, width, 3)
    assert (resized == (0, 100, 255)).all()
  image = noise(7, 31)
  np.testing.assert_array_equal(resize(image, 7, 31, interpolation), image)
