"""Tests of maps of classes, which are cut like the image they belong to."""

import io

import numpy as np
import PIL.Image
import pytest

from vit_jax.data.augment import maps
from vit_jax.data.images.decode import decode_map
from vit_jax.data.images.headers import DecodeError

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
SIZE = (24, 40)


def png(pixels, mode=None):
  file = io.BytesIO()
  image = PIL.Image.fromarray(pixels)
  if mode == 'P':
    image = image.convert('L').copy()
    image.putpalette([value % 256 for value in range(768)][::-1])
  image.save(file, 'png')
  return file.getvalue()


def example(seed=0):
  """Returns an image in which the colour of each pixel is its class."""
  rng = np.random.default_rng(seed)
  blocks = rng.integers(0, 3, (6, 9))
  classes = np.kron(blocks, np.ones((13, 11), int)).astype(np.uint8)
  return {'image': COLOURS[classes], 'label': 0, 'classes': png(classes)}


TRAIN = [
  dict(crop=crop, min_area=0.1)
  for crop in ('inception', 'torchvision', 'squash', 'pad', 'none')
]
EVAL = [
  dict(resize=resize)
  for resize in ('squash', 'central', 'squash_central', 'torchvision')
]


@pytest.mark.parametrize(
  'kind, keys',
  [
    *((maps.TrainTransform, keys) for keys in TRAIN),
    *((maps.EvalTransform, keys) for keys in EVAL),
  ],
)
def test_a_map_is_cut_like_its_image(kind, keys):
  """The class of a pixel is that of its colour, except next to edges."""
  transform = kind(SIZE, maps=('classes',), **keys)
  differ = []
  for seed in range(6):
    arrays = transform(example(seed), np.random.default_rng(seed))
    assert arrays['classes'].dtype == transform.spec['classes'][1]
    assert arrays['classes'].shape == transform.spec['classes'][0] == SIZE
    pure = arrays['image'].max(-1) > 250  # not mixed by interpolation
    assert pure.mean() > 0.3
    differ.append((arrays['image'].argmax(-1) != arrays['classes'])[pure])
  assert np.concatenate(differ).mean() < 0.005


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(classes=png(np.zeros((5, 7), np.uint8))), '(5, 7)'),
    (dict(classes=png(np.full((78, 99), 9, np.uint8))), '9'),
    (dict(classes=png(np.zeros((78, 99, 3), np.uint8))), '[78, 99, 3]'),
    (dict(classes=b'\x89PNG\r\n\x1a\n'), ''),
    (dict(classes=np.zeros((78, 99), np.float32)), 'float32'),
  ],
)
def test_bad_maps_are_bad_records(change, words):
  transform = maps.EvalTransform(SIZE, maps=('classes',), table=(0, 1, 2))
  with pytest.raises(DecodeError) as error:
    transform(example() | change)
  assert words in str(error.value)


@pytest.mark.parametrize('mode, dtype', [('L', 'u1'), ('P', 'u1'), ('I', 'u2')])
def test_maps_are_grey_or_have_a_palette(mode, dtype):
  """A palette's indices are the integers, not its colours."""
  values = np.arange(12, dtype=dtype).reshape(3, 4) * (
    300 if mode == 'I' else 7
  )
  np.testing.assert_array_equal(decode_map(png(values, mode)), values)
  np.testing.assert_array_equal(decode_map(values[..., None]), values)
