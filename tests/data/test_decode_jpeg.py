"""JPEG: boxes against the whole, damage, and no need for simplejpeg."""

import cv2
import numpy as np
import pytest
from pictures import encode, noise, smooth
from PIL import Image
from pillow_files import opened, saved, turned

from vit_jax.data import decode as decoding
from vit_jax.data.decode import decode, decode_box
from vit_jax.data.headers import DecodeError


@pytest.fixture
def no_simplejpeg(monkeypatch):
  """As if it were not installed."""
  monkeypatch.setattr(decoding, 'simplejpeg', None)


# Boxes of JPEGs


def jpegs(height, width):
  """Files of each kind of sampling, progressive and with restarts."""
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


@pytest.mark.parametrize('height, width', [(1, 1), (17, 9), (50, 70)])
def test_a_box_is_cut_from_the_whole(height, width, monkeypatch):
  """Stopping below the box changes no pixel in it; nor does simplejpeg."""
  pytest.importorskip('simplejpeg')
  for data in jpegs(height, width):
    with monkeypatch.context() as patch:
      patch.setattr(decoding, 'simplejpeg', None)
      whole = decode(data)
    for top in range(height):
      for rows in {1, 2, (height - top + 1) // 2, height - top}:
        rows = min(rows, height - top)
        box = (top, width // 3, rows, width - width // 3)
        part = decode_box(data, lambda y, x, box=box: box)
        np.testing.assert_array_equal(part, whole[top:, width // 3 :][:rows])


def test_the_rows_below_a_box_are_not_decoded(monkeypatch):
  """The decoder is asked for a shorter image."""
  simplejpeg = pytest.importorskip('simplejpeg')
  heights = []

  class Spy:
    @staticmethod
    def decode_jpeg(data, *arguments, **settings):
      pixels = simplejpeg.decode_jpeg(data, *arguments, **settings)
      heights.append(len(pixels))
      return pixels

  monkeypatch.setattr(decoding, 'simplejpeg', Spy)
  data = encode(smooth(80, 60), '.jpg')
  assert decode_box(data, lambda y, x: (5, 0, 30, x)).shape == (30, 60, 3)
  assert decode(data).shape == (80, 60, 3)
  assert heights == [37, 80]


@pytest.mark.parametrize('orientation', [3, 6])
def test_boxes_are_of_the_upright_image(orientation):
  """The size given, and the box taken, are those a person would see."""
  data = turned('JPEG', orientation)
  sizes = []

  def box_of(height, width):
    sizes.append((height, width))
    return 2, 3, 4, 5

  part, whole = decode_box(data, box_of), opened(data)
  assert sizes == [whole.shape[:2]]
  np.testing.assert_array_equal(part, whole[2:6, 3:8])


@pytest.mark.parametrize('orientation', [1, 3, 6])
def test_orientation_without_simplejpeg(no_simplejpeg, orientation):
  """OpenCV alone does the same, and turns nothing twice."""
  data = turned('JPEG', orientation)
  np.testing.assert_array_equal(decode(data), opened(data))


# Damage


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'GIF', 'BMP', 'WEBP'])
@pytest.mark.parametrize('less', [2, 10, 100, 1000])
def test_files_without_their_end(kind, less):
  """Even a few bytes less are noticed, with any reader."""
  image = Image.fromarray(noise(40, 50))
  data = saved(image.quantize(64) if kind == 'GIF' else image, kind)
  decode(data)
  with pytest.raises(DecodeError):
    decode(data[:-less])


def test_a_jpeg_cut_short_without_simplejpeg(no_simplejpeg):
  """Our own check finds it, before OpenCV could fill it with grey."""
  data = encode(noise(40, 50), '.jpg')
  with pytest.raises(DecodeError, match='end marker'):
    decode(data[:-2])


def test_bytes_after_the_end_do_not_matter():
  """Cameras append previews and padding."""
  data = encode(noise(40, 50), '.jpg')
  np.testing.assert_array_equal(decode(data + bytes(100)), decode(data))


def test_damage_is_judged_alike_with_simplejpeg_and_without(monkeypatch):
  """Which records are bad does not depend on an optional package."""
  pytest.importorskip('simplejpeg')
  good = encode(smooth(64, 64), '.jpg')
  rng = np.random.default_rng(0)

  def outcome(data):
    try:
      return decode(data)
    except DecodeError:
      return np.zeros(0)

  failures = 0
  for _ in range(150):
    data = bytearray(good)
    for _ in range(2):
      data[rng.integers(2, len(data) - 2)] = rng.integers(256)
    fast = outcome(bytes(data))
    with monkeypatch.context() as patch:
      patch.setattr(decoding, 'simplejpeg', None)
      np.testing.assert_array_equal(outcome(bytes(data)), fast)
    failures += not fast.size
  assert 20 < failures < 130
