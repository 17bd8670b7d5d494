"""Tests of boxes of JPEGs, decoded at each size, and of damage."""

import contextlib

import cv2
import numpy as np
import pytest
from PIL import Image
from pillow_files import opened, saved, turned
from sample_images import encode, noise, smooth

from tests.faults.counts import further
from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.images import headers, jpeg
from vit_jax.data.images.decode import decode, decode_to_resize
from vit_jax.data.images.headers import DecodeError

# Boxes

FLAGS = {
  1: cv2.IMREAD_COLOR,
  2: cv2.IMREAD_REDUCED_COLOR_2,
  4: cv2.IMREAD_REDUCED_COLOR_4,
  8: cv2.IMREAD_REDUCED_COLOR_8,
}


def decode_box(data, box):
  """Decodes a box at its own size."""
  return decode_to_resize(data, lambda y, x: (box, box[2:]))[0]


@pytest.fixture(params=['simplejpeg', 'opencv'])
def decoder(request, monkeypatch):
  """Leaves only one of the decoders."""
  if request.param == 'opencv':
    monkeypatch.setattr(jpeg, '_simplejpeg', lambda *_: None)


def jpegs(height, width):
  """Yields files with each chroma subsampling, progressive, with restarts."""
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


@pytest.mark.parametrize('shrink', FLAGS)
@pytest.mark.parametrize('height, width', [(50, 70), *further([1, 1], [17, 9])])
def test_a_decoded_box_equals_the_whole_image(decoder, height, width, shrink):
  """Both decoders give the pixels of the whole image at that size."""
  for data in jpegs(height, width):
    flags = FLAGS[shrink] | cv2.IMREAD_IGNORE_ORIENTATION
    whole = cv2.imdecode(np.frombuffer(data, np.uint8), flags)[..., ::-1]
    rows, columns = whole.shape[:2]
    assert (rows, columns) == (-(-height // shrink), -(-width // shrink))
    rng = np.random.default_rng(0)
    for top in range(rows):
      for count in {1, min(2, rows - top), (rows - top + 1) // 2, rows - top}:
        left = int(rng.integers(columns))
        box = top, left, count, int(rng.integers(1, columns - left + 1))
        part = jpeg.decode_box(data, headers.jpeg(data), box, shrink)
        expected = whole[top : top + count, left : left + box[3]]
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize('orientation', [3, 6])
def test_boxes_are_of_the_upright_image(orientation):
  """Size and box refer to the image after the orientation is applied."""
  data = turned('JPEG', orientation)
  sizes = []

  def plan(height, width):
    sizes.append((height, width))
    return (2, 3, 4, 5), (4, 5)

  (part, _), whole = decode_to_resize(data, plan), opened(data)
  assert sizes == [whole.shape[:2]]
  np.testing.assert_array_equal(part, whole[2:6, 3:8])


@pytest.mark.parametrize(
  'box, size, decoded',
  [
    ((0, 0, 90, 120), (90, 120), (90, 120)),
    ((0, 0, 90, 120), (46, 60), (90, 120)),
    ((0, 0, 90, 120), (45, 61), (90, 120)),
    ((0, 0, 90, 120), (45, 60), (45, 60)),
    ((10, 20, 80, 100), (21, 20), (40, 50)),
    ((10, 20, 80, 100), (20, 25), (20, 25)),
    ((0, 0, 90, 120), (11, 15), (11, 15)),
    ((0, 0, 90, 120), (1, 1), (11, 15)),
    ((3, 5, 41, 47), (20, 20), (20, 23)),
    ((0, 0, 90, 120), (200, 300), (90, 120)),
  ],
)
def test_the_smallest_sufficient_size_is_decoded(box, size, decoded):
  """It is never smaller than the result."""
  data = encode(noise(90, 120), '.jpg')
  pixels, target = decode_to_resize(data, lambda y, x: (box, size), scaled=True)
  assert pixels.shape == (*decoded, 3) and target == size
  y, x, height, width = box
  np.testing.assert_array_equal(
    decode_box(data, box), decode(data)[y : y + height, x : x + width]
  )


@pytest.mark.parametrize(
  'crop, interpolation',
  [
    ('inception', 'bilinear'),
    ('torchvision', 'area'),
    ('squash', 'bicubic'),
    ('pad', 'bilinear'),
  ],
)
def test_training_crops_at_each_size_are_the_same(crop, interpolation):
  """Random numbers are the same, and a ramp hardly moves.

  Its slope is two grey levels per pixel. At a quarter of the size, each edge
  moves by at most two pixels.
  """
  data = encode(smooth(96, 100), '.jpg')
  keys = dict(crop=crop, interpolation=interpolation, min_area=0.3)
  changed = 0
  for seed in range(20):
    plain, scaled = (
      TrainTransform((16, 16), scaled_decoding=scaled, **keys)
      .pixels(data, np.random.default_rng(seed))
      .astype(int)
      for scaled in (False, True)
    )
    assert np.abs(plain - scaled).max() <= 6
    changed += (plain != scaled).any()
  assert changed


# Damage


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'GIF', 'BMP', 'WEBP'])
@pytest.mark.parametrize('less', [2, 10, 100, 1000])
def test_a_few_missing_bytes_are_detected(kind, less):
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
  part = decode_box(damaged, (3, 5, 20, 30))
  np.testing.assert_array_equal(part, decode(data)[3:23, 5:35])
  with pytest.raises(DecodeError, match='premature end'):
    decode_box(damaged, (40, 5, 20, 30))


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
      with contextlib.suppress(DecodeError):
        assert decode(data).ndim == 3
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


@pytest.mark.parametrize('shrink', [1, 2, 8])
def test_damage_is_detected_at_every_size(decoder, shrink):
  """The set of bad records does not depend on the option."""
  damaged, size = cut(encode(noise(64, 64), '.jpg'), 0.6), 64 // shrink
  with pytest.raises(DecodeError, match='premature end'):
    decode_to_resize(
      damaged, lambda y, x: ((0, 0, y, x), (size, size)), scaled=True
    )
