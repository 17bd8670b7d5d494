"""Images of any number of channels: files, resizing, crops, pictures."""

import contextlib
import io
import struct
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest
import tifffile

from vit_jax.data.augment.transforms import EvalTransform, TrainTransform
from vit_jax.data.images import channels as channels_lib
from vit_jax.data.images.decode import INTERPOLATIONS, decode, resize
from vit_jax.data.images.headers import DecodeError


def noise(channels, bits, size=(18, 14)):
  rng = np.random.default_rng(channels)
  return rng.integers(0, 2**bits, (*size, channels)).astype(f'uint{bits}')


def tiff(pixels, photometric='minisblack', **keys):
  file = io.BytesIO()
  tifffile.imwrite(file, pixels, photometric=photometric, **keys)
  return file.getvalue()


def contiguous(pixels, **keys):
  return tiff(pixels, planarconfig='contig', **keys)


def npy(pixels):
  file = io.BytesIO()
  np.save(file, pixels)
  return file.getvalue()


def png(pixels, kind):
  """Encodes PNG of a colour type: 0 is grey, 2 RGB; 4 and 6 have alpha."""

  def chunk(name, data):
    check = struct.pack('>I', zlib.crc32(name + data))
    return struct.pack('>I', len(data)) + name + data + check

  height, width = pixels.shape[:2]
  rows = [b'\0' + big_endian(row).tobytes() for row in pixels]
  bits = 8 * pixels.dtype.itemsize
  header = struct.pack('>IIBBBBB', width, height, bits, kind, 0, 0, 0)
  return (
    b'\x89PNG\r\n\x1a\n'
    + chunk(b'IHDR', header)
    + chunk(b'IDAT', zlib.compress(b''.join(rows)))
    + chunk(b'IEND', b'')
  )


def planes(pixels):
  return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def big_endian(pixels):
  return pixels.astype(pixels.dtype.newbyteorder('>'))


STRIPS = dict(compression='deflate', rowsperstrip=4, predictor=True)
FILES = {
  'pixels': lambda x: contiguous(x),
  'planes': lambda x: tiff(planes(x), planarconfig='separate'),
  'pages': lambda x: tiff(planes(x)),
  'strips': lambda x: contiguous(x, **STRIPS),
  'tiles': lambda x: contiguous(x, tile=(16, 16)),
  'big': lambda x: contiguous(x, bigtiff=True, byteorder='>'),
  'npy': npy,
  'columns.npy': lambda x: npy(np.asfortranarray(x)),
  'big.npy': lambda x: npy(big_endian(x)),
}


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('channels, bits', [(5, 16), (2, 8), (16, 16)])
def test_files_contain_what_was_written(name, channels, bits):
  pixels = noise(channels, bits)
  found = decode(FILES[name](pixels), channels, bits)
  np.testing.assert_array_equal(found, pixels, strict=True)
  assert found.dtype.isnative and found.flags.c_contiguous


@pytest.mark.parametrize('bits', [8, 16])
@pytest.mark.parametrize('channels, kind', [(1, 0), (3, 2), (2, 4), (4, 6)])
def test_png_keeps_its_channels(channels, kind, bits):
  """The order is RGB and alpha, and grey with alpha has two channels."""
  pixels = noise(channels, bits)
  found = decode(png(pixels, kind), channels, bits)
  np.testing.assert_array_equal(found, pixels, strict=True)


def test_one_channel():
  """Files of one channel need no axis for it; TIFF's white may be 0."""
  pixels = noise(1, 16)
  flat = pixels[..., 0]
  inverted = tiff(65535 - flat, photometric='miniswhite')
  for file in (tiff(flat), npy(flat), flat, pixels, inverted):
    np.testing.assert_array_equal(decode(file, 1, 16), pixels, strict=True)
  grey = noise(1, 8)
  jpeg = cv2.imencode('.jpg', grey)[1].tobytes()
  np.testing.assert_array_equal(decode(jpeg, 1, 8), decode(jpeg)[..., :1])


WHOLE = noise(5, 16)
OTHERS = {
  'channels': npy(noise(4, 16)),
  'channels.tif': contiguous(noise(4, 16)),
  'bits': npy(noise(5, 8)),
  'sign': npy(noise(5, 16).astype(np.int16)),
  'floats.tif': contiguous(noise(5, 16).astype(np.float32)),
  'dimensions': npy(noise(5, 16)[None]),
  'planes first': npy(planes(noise(5, 16))),
  'palette': png(noise(1, 8), 3),
  'jpeg': cv2.imencode('.jpg', noise(3, 8))[1].tobytes(),
}


@pytest.mark.parametrize('name', OTHERS)
def test_other_images_are_bad_records(name):
  """The message contains the expected channels and bits."""
  with pytest.raises(DecodeError, match=r'uint16 \[y, x, 5\]'):
    decode(OTHERS[name], 5, 16)


@pytest.mark.parametrize('name', FILES)
def test_truncated_files(name):
  """Either the file is a bad record, or no pixel is missing."""
  file, rng = FILES[name](WHOLE), np.random.default_rng(0)
  for length in (8, 10, 100, len(file) // 2, *rng.integers(0, len(file), 20)):
    with contextlib.suppress(DecodeError):
      found = decode(file[:length], 5, 16)
      np.testing.assert_array_equal(found, WHOLE)


def _huge_npy():
  file = io.BytesIO()
  header = {'descr': '<u2', 'fortran_order': False, 'shape': (2**20, 2**20, 5)}
  np.lib.format.write_array_header_1_0(file, header)
  return file.getvalue()


def _huge_tiff():
  file = contiguous(WHOLE)
  with tifffile.TiffFile(io.BytesIO(file)) as found:
    for name in ('ImageWidth', 'ImageLength'):
      at = found.pages.first.tags[name].valueoffset
      file = file[:at] + struct.pack('<I', 60_000) + file[at + 4 :]
  return file


def _huge_png():
  file = png(noise(1, 16), 0)
  return file[:16] + struct.pack('>II', 2**20, 2**20) + file[24:]


@pytest.mark.parametrize(
  'make, channels', [(_huge_npy, 5), (_huge_tiff, 5), (_huge_png, 1)]
)
def test_a_huge_size_in_a_header_needs_no_memory(make, channels):
  """The size is compared with the limit before anything is allocated."""
  file = make()
  tracemalloc.start()
  with pytest.raises(DecodeError, match='bytes'):
    decode(file, channels, 16)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2**22


@pytest.mark.parametrize('interpolation', INTERPOLATIONS)
@pytest.mark.parametrize('size', [(9, 30), (30, 9), (7, 5)])
def test_channels_are_resized_independently(interpolation, size):
  """Each channel gives what it gives as a colour; 16 bits agree with 8."""
  rgb, small = noise(3, 8), noise(5, 8)
  found = resize(rgb, *size, interpolation)
  many = resize(np.concatenate([rgb, small], axis=2), *size, interpolation)
  np.testing.assert_array_equal(many[..., :3], found)
  for i in range(5):
    one = resize(small[..., i : i + 1], *size, interpolation)
    assert one.shape == (*size, 1)
    np.testing.assert_array_equal(many[..., 3 + i], one[..., 0])
  wide = resize(small.astype(np.uint16) * 257, *size, interpolation)
  assert wide.dtype == np.uint16
  # 8 bits are rounded after each axis.
  np.testing.assert_allclose(wide / 257, many[..., 3:], atol=2)


@pytest.mark.parametrize('channels', [1, 5])
@pytest.mark.parametrize(
  'crop', ['inception', 'torchvision', 'squash', 'pad', 'none']
)
def test_crops_do_not_depend_on_the_channels(crop, channels):
  """One channel, RGB and five channels of a grey image are cut equally."""
  grey = noise(1, 8, (40, 30))
  keys = dict(crop=crop, interpolation='area')
  rgb = TrainTransform((12, 16), **keys)
  other = TrainTransform((12, 16), **keys, channels=channels)
  assert other.spec['image'] == ((12, 16, channels), np.dtype(np.uint8))
  for seed in range(4):
    image = grey.repeat(channels, axis=2)
    found = other.pixels(image, np.random.default_rng(seed))
    expected = rgb.pixels(grey, np.random.default_rng(seed))[..., :1]
    expected = expected.repeat(channels, axis=2)
    np.testing.assert_array_equal(found, expected, strict=True)


def test_evaluation_of_sixteen_bits():
  """An image of the right size is returned unchanged, as uint16."""
  transform = EvalTransform((18, 14), channels=5, bits=16)
  assert transform.spec['image'] == (WHOLE.shape, WHOLE.dtype)
  found = transform.pixels(npy(WHOLE))
  np.testing.assert_array_equal(found, WHOLE, strict=True)


def test_pictures():
  """RGB is unchanged; others are stretched, with their first channels."""
  np.testing.assert_array_equal(channels_lib.rgb(noise(3, 8)), noise(3, 8))
  dark = np.stack([np.full((4, 4), 100), np.full((4, 4), 300)], 2)
  dark[0, 0, 0] = 200
  found = channels_lib.rgb(dark.astype(np.uint16))
  assert found.shape == (4, 4, 3) and found.dtype == np.uint8
  np.testing.assert_array_equal(found, found[..., :1].repeat(3, axis=2))
  assert found[0, 0, 0] == 255 and found[1, 1, 0] == 0
  pixels = noise(5, 16)
  images = pixels.astype(np.float32) / 32767.5 - 1
  np.testing.assert_allclose(
    channels_lib.pixels_of(images, np.dtype(np.uint16)), pixels, atol=1
  )
