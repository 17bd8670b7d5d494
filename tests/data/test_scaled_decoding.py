"""Tests of decoding JPEGs at a half, a quarter or an eighth of their size."""

import cv2
import numpy as np
import pytest
from PIL import Image
from pillow_files import saved
from sample_images import encode, noise, smooth

from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.images import headers, jpeg
from vit_jax.data.images.decode import decode, decode_to_resize
from vit_jax.data.images.headers import DecodeError

REDUCED = {
  2: cv2.IMREAD_REDUCED_COLOR_2,
  4: cv2.IMREAD_REDUCED_COLOR_4,
  8: cv2.IMREAD_REDUCED_COLOR_8,
}


@pytest.fixture(params=['simplejpeg', 'opencv'])
def decoder(request, monkeypatch):
  """Leaves only one of the decoders."""
  if request.param == 'opencv':
    monkeypatch.setattr(jpeg, '_simplejpeg', lambda *_: None)


@pytest.mark.parametrize('shrink', [2, 4, 8])
@pytest.mark.parametrize('subsampling', ['4:4:4', '4:2:2', '4:2:0', '4:1:1'])
@pytest.mark.parametrize('progressive', [False, True])
def test_a_box_equals_the_whole_image(
  decoder, shrink, subsampling, progressive
):
  """All decoders give the pixels of the whole image at that size."""
  image = Image.fromarray(cv2.GaussianBlur(noise(101, 147), (3, 3), 1))
  data = saved(image, 'JPEG', subsampling=subsampling, progressive=progressive)
  whole = cv2.imdecode(np.frombuffer(data, np.uint8), REDUCED[shrink])
  whole = whole[..., ::-1]
  height, width = -(-101 // shrink), -(-147 // shrink)
  assert whole.shape == (height, width, 3)
  rng = np.random.default_rng(0)
  for _ in range(20):
    top, left = rng.integers(height), rng.integers(width)
    rows = int(rng.integers(1, height - top + 1))
    columns = int(rng.integers(1, width - left + 1))
    box = int(top), int(left), rows, columns
    part = jpeg.decode_box(data, headers.jpeg(data), box, shrink)
    expected = whole[top : top + rows, left : left + columns]
    np.testing.assert_array_equal(part, expected)


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
  pixels, _ = decode_to_resize(data, lambda y, x: (box, size))
  y, x, height, width = box
  np.testing.assert_array_equal(
    pixels, decode(data)[y : y + height, x : x + width]
  )


@pytest.mark.parametrize('interpolation', ['bilinear', 'area', 'bicubic'])
@pytest.mark.parametrize('crop', ['inception', 'torchvision', 'squash', 'pad'])
def test_training_crops_are_the_same(crop, interpolation):
  """Random numbers are the same, and a ramp hardly moves.

  Its slope is two grey levels per pixel. At a quarter of the size, each edge
  moves by at most two pixels.
  """
  data = encode(smooth(96, 100), '.jpg')
  plain, scaled = (
    TrainTransform(
      (16, 16),
      crop=crop,
      interpolation=interpolation,
      min_area=0.3,
      scaled_decoding=scaled,
    )
    for scaled in (False, True)
  )
  changed = 0
  for seed in range(20):
    rngs = np.random.default_rng(seed), np.random.default_rng(seed)
    a = plain.pixels(data, rngs[0]).astype(int)
    b = scaled.pixels(data, rngs[1]).astype(int)
    assert rngs[0].bit_generator.state == rngs[1].bit_generator.state
    assert np.abs(a - b).max() <= 6
    changed += (a != b).any()
  assert changed


@pytest.mark.parametrize('shrink', [1, 2, 8])
def test_damage_is_detected_at_every_size(decoder, shrink):
  """The set of bad records does not depend on the option."""
  data = encode(noise(64, 64), '.jpg')
  damaged = data[: len(data) * 6 // 10] + b'\xff\xd9'
  size = 64 // shrink, 64 // shrink
  with pytest.raises(DecodeError, match='premature end'):
    decode_to_resize(damaged, lambda y, x: ((0, 0, y, x), size), scaled=True)
