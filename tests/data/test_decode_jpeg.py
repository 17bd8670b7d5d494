"""Tests of JPEG boxes and of damage."""

import cv2
import numpy as np
import pytest
from PIL import Image
from pillow_files import opened, saved, turned
from sample_images import encode, noise, smooth

from tests.faults.counts import further
from vit_jax.data.images.decode import decode, decode_to_resize
from vit_jax.data.images.headers import DecodeError

# Boxes of JPEGs


def decode_box(data, box_of):
  """Decodes the box `box_of(height, width)`."""
  return decode_to_resize(data, lambda y, x: (box_of(y, x), (y, x)))[0]


def jpegs(height, width):
  """Returns files with each chroma subsampling, progressive, with restarts."""
  image = Image.fromarray(cv2.GaussianBlur(noise(height, width), (3, 3), 1))
  for subsampling in ('4:4:4', '4:2:2', '4:2:0', '4:1:1'):
    for progressive in (False, True):
      for restart in (0, 3):
        yield saved(
          image,
          'JPEG',
          subsampling=subsampling,
          progressive=progressive,
          restart_marker_blocks=restart,
        )
  tall = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x121111]  # 4:4:0
  yield cv2.imencode('.jpg', np.array(image), tall)[1].tobytes()
  yield saved(image.convert('L'), 'JPEG')


@pytest.mark.slow
@pytest.mark.parametrize('height, width', [(50, 70), *further([1, 1], [17, 9])])
def test_a_decoded_box_equals_the_whole_image(height, width):
  """Decoding only a box gives the same pixels as decoding the whole image."""
  for data in jpegs(height, width):
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    whole = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    rng = np.random.default_rng(0)
    for top in range(height):
      for rows in {1, 2, (height - top + 1) // 2, height - top}:
        rows = min(rows, height - top)
        left = int(rng.integers(width))
        columns = int(rng.integers(1, width - left + 1))
        box = (top, left, rows, columns)
        part = decode_box(data, lambda y, x, box=box: box)
        expected = whole[top : top + rows, left : left + columns]
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize('orientation', [3, 6])
def test_boxes_are_of_the_upright_image(orientation):
  """Size and box refer to the image after the orientation is applied."""
  data = turned('JPEG', orientation)
  sizes = []

  def box_of(height, width):
    sizes.append((height, width))
    return 2, 3, 4, 5

  part, whole = decode_box(data, box_of), opened(data)
  assert sizes == [whole.shape[:2]]
  np.testing.assert_array_equal(part, whole[2:6, 3:8])


# Damage


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'GIF', 'BMP', 'WEBP'])
@pytest.mark.parametrize('less', [2, 10, 100, 1000])
def test_a_few_missing_bytes_are_detected(kind, less):
  """In every format."""
  image = Image.fromarray(noise(40, 50))
  data = saved(image.quantize(64) if kind == 'GIF' else image, kind)
  decode(data)
  if kind == 'GIF':
    data = data[:-2]  # the end of the frame and of the file, without pixels
  with pytest.raises(DecodeError):
    decode(data[:-less])


def cut(data, share):
  """Truncates a JPEG and appends the end marker, as some programs do."""
  return data[: int(share * len(data))] + b'\xff\xd9'


KINDS = {
  'baseline': (Image.fromarray(noise(80, 64)), {}),
  'progressive': (Image.fromarray(noise(80, 64)), {'progressive': True}),
  'grey': (Image.fromarray(noise(80, 64, 0)), {}),
  'by OpenCV': (Image.fromarray(noise(80, 64, 4), 'CMYK'), {}),
}


@pytest.mark.parametrize('kind', KINDS)
def test_truncated_jpegs_with_an_end_marker_are_detected(kind):
  """libjpeg would fill the missing part with grey."""
  image, settings = KINDS[kind]
  data = saved(image, 'JPEG', **settings)
  decode(data)
  for share in (0.5, 0.7, 0.9):
    with pytest.raises(DecodeError, match='premature end'):
      decode(cut(data, share))


def test_a_box_above_the_damage_is_decoded():
  """Other boxes raise an error."""
  data = encode(noise(80, 64), '.jpg')
  damaged = cut(data, 0.6)
  part = decode_box(damaged, lambda y, x: (3, 5, 20, 30))
  np.testing.assert_array_equal(part, decode(data)[3:23, 5:35])
  with pytest.raises(DecodeError, match='premature end'):
    decode_box(damaged, lambda y, x: (40, 5, 20, 30))


@pytest.mark.parametrize('kind', KINDS)
def test_surplus_bytes_are_ignored(kind):
  """libjpeg warns of surplus bytes, with which cameras pad their files."""
  image, settings = KINDS[kind]
  data = saved(image, 'JPEG', **settings)
  for padded in (data[:-2] + bytes(9) + data[-2:], data + bytes(100)):
    np.testing.assert_array_equal(decode(padded), decode(data))


@pytest.mark.parametrize('kind', ['JPEG', 'TIFF'])
def test_damaged_headers_raise_decode_errors(kind):
  """With any changed byte, the result is an image or a DecodeError."""
  good = saved(Image.fromarray(smooth(20, 20)), kind)
  end = good.index(b'\xff\xda') + 12 if kind == 'JPEG' else len(good)
  for place in range(2, end, 1 if kind == 'JPEG' else 7):
    for value in (0, 1, 255):
      data = good[:place] + bytes([value]) + good[place + 1 :]
      try:
        assert decode(data).ndim == 3
      except DecodeError:
        pass
  for length in range(0, end - 12, 5):
    with pytest.raises(DecodeError):
      decode(good[:length] + (b'\xff\xd9' if kind == 'JPEG' else b''))


def test_a_missing_restart_interval_is_detected():
  """If blocks between two markers are missing, libjpeg only warns."""
  image = Image.fromarray(noise(80, 64))
  data = saved(image, 'JPEG', restart_marker_blocks=3)
  at = data.index(b'\xff\xd1')
  with pytest.raises(DecodeError, match='damaged'):
    decode(data[:at] + data[data.index(b'\xff\xd3') :])
