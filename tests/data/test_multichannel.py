"""Images of any number of channels: files, resizing, crops, pictures."""

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
from vit_jax.errors import UserError

CROPS = ('inception', 'torchvision', 'squash', 'pad', 'none')


def noise(channels, bits, size=(18, 14)):
  rng = np.random.default_rng(channels)
  return rng.integers(0, 2**bits, (*size, channels)).astype(f'uint{bits}')


def tiff(pixels, **keys):
  file = io.BytesIO()
  tifffile.imwrite(file, pixels, photometric='minisblack', **keys)
  return file.getvalue()


def npy(pixels):
  file = io.BytesIO()
  np.save(file, pixels)
  return file.getvalue()


def png(pixels, kind, bits=None):
  """Encodes PNG of a colour type: 0 is grey, 2 RGB; 4 and 6 have alpha."""

  def chunk(name, data):
    check = struct.pack('>I', zlib.crc32(name + data))
    return struct.pack('>I', len(data)) + name + data + check

  height, width = pixels.shape[:2]
  rows = [
    b'\0' + row.astype(pixels.dtype.newbyteorder('>')).tobytes()
    for row in pixels
  ]
  bits = bits or 8 * pixels.dtype.itemsize
  header = struct.pack('>IIBBBBB', width, height, bits, kind, 0, 0, 0)
  return (
    b'\x89PNG\r\n\x1a\n'
    + chunk(b'IHDR', header)
    + chunk(b'IDAT', zlib.compress(b''.join(rows)))
    + chunk(b'IEND', b'')
  )


def planes(pixels):
  return np.ascontiguousarray(pixels.transpose(2, 0, 1))


FILES = {
  'pixels': lambda x: tiff(x, planarconfig='contig'),
  'planes': lambda x: tiff(planes(x), planarconfig='separate'),
  'pages': lambda x: tiff(planes(x)),
  'strips': lambda x: tiff(
    x,
    planarconfig='contig',
    compression='deflate',
    rowsperstrip=4,
    predictor=True,
  ),
  'tiles': lambda x: tiff(x, planarconfig='contig', tile=(16, 16)),
  'big': lambda x: tiff(x, planarconfig='contig', bigtiff=True, byteorder='>'),
  'npy': npy,
  'columns.npy': lambda x: npy(np.asfortranarray(x)),
  'big.npy': lambda x: npy(x.astype(x.dtype.newbyteorder('>'))),
}


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('channels, bits', [(5, 16), (2, 8), (16, 16)])
def test_files_contain_what_was_written(name, channels, bits):
  """All layouts of TIFF and .npy files have the same pixels."""
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
  inverted = io.BytesIO()
  tifffile.imwrite(inverted, 65535 - pixels[..., 0], photometric='miniswhite')
  flat = pixels[..., 0]
  for file in (tiff(flat), npy(flat), flat, pixels, inverted.getvalue()):
    np.testing.assert_array_equal(decode(file, 1, 16), pixels, strict=True)
  grey = noise(1, 8)
  jpeg = cv2.imencode('.jpg', grey)[1].tobytes()
  np.testing.assert_array_equal(decode(jpeg, 1, 8), decode(jpeg)[..., :1])


WHOLE = noise(5, 16)
OTHERS = {
  'channels': npy(noise(4, 16)),
  'channels.tif': tiff(noise(4, 16), planarconfig='contig'),
  'bits': npy(noise(5, 8)),
  'sign': npy(noise(5, 16).astype(np.int16)),
  'floats.tif': tiff(noise(5, 16).astype(np.float32), planarconfig='contig'),
  'dimensions': npy(noise(5, 16)[None]),
  'planes first': npy(planes(noise(5, 16))),
  'palette': png(noise(1, 8), 3),
  'jpeg': cv2.imencode('.jpg', noise(3, 8))[1].tobytes(),
  'empty': b'',
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
    try:
      found = decode(file[:length], 5, 16)
    except DecodeError:
      continue
    np.testing.assert_array_equal(found, WHOLE)


def _huge_npy():
  file = io.BytesIO()
  header = {'descr': '<u2', 'fortran_order': False, 'shape': (2**20, 2**20, 5)}
  np.lib.format.write_array_header_1_0(file, header)
  return file.getvalue()


def _huge_tiff():
  file = bytearray(tiff(WHOLE, planarconfig='contig'))
  with tifffile.TiffFile(io.BytesIO(bytes(file))) as found:
    tags = found.pages.first.tags
    places = [tags[name].valueoffset for name in ('ImageWidth', 'ImageLength')]
  for place in places:
    file[place : place + 4] = struct.pack('<I', 60_000)
  return bytes(file)


def test_a_huge_size_in_a_header_needs_no_memory():
  """The size is compared with the limit before anything is allocated."""
  tall = png(noise(1, 16), 0)
  tall = tall[:16] + struct.pack('>II', 2**20, 2**20) + tall[24:]
  for file, channels in ((_huge_npy(), 5), (_huge_tiff(), 5), (tall, 1)):
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


@pytest.mark.parametrize('crop', CROPS)
def test_crops_do_not_depend_on_the_channels(crop):
  """One channel, RGB and five channels of a grey image are cut equally."""
  grey = noise(1, 8, (40, 30))
  keys = dict(crop=crop, interpolation='area')
  rgb = TrainTransform((12, 16), **keys)
  for channels in (1, 5):
    other = TrainTransform((12, 16), **keys, channels=channels)
    assert other.spec['image'] == ((12, 16, channels), np.dtype(np.uint8))
    for seed in range(4):
      image = grey.repeat(channels, axis=2)
      found = other.pixels(image, np.random.default_rng(seed))
      expected = rgb.pixels(grey, np.random.default_rng(seed))[..., :1]
      assert found.shape == (12, 16, channels)
      np.testing.assert_array_equal(
        found, np.broadcast_to(expected, found.shape)
      )


def test_evaluation_of_sixteen_bits():
  """An image of the right size is returned unchanged, as uint16."""
  transform = EvalTransform((18, 14), channels=5, bits=16)
  assert transform.spec['image'] == ((18, 14, 5), np.dtype(np.uint16))
  np.testing.assert_array_equal(
    transform.pixels(npy(WHOLE)), WHOLE, strict=True
  )


@pytest.mark.parametrize(
  'key, value',
  [('randaugment_layers', 2), ('three_augment', True), ('color_jitter', 0.3)],
)
@pytest.mark.parametrize('kind', [dict(channels=4), dict(bits=16)])
def test_operations_on_colours_are_refused(key, value, kind):
  """The message names the operation and the key of the images."""
  (other,) = kind
  with pytest.raises(UserError, match=rf'augment\.{key}.*augment\.{other}'):
    TrainTransform((8, 8), **{key: value}, **kind)
  TrainTransform((8, 8), **{key: value})


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
