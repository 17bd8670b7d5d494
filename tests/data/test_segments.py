"""Tests of maps of classes, which are cut out like the image they belong to.

Random crops are those of mmsegmentation.
"""

import io

import numpy as np
import PIL.Image
import pytest
from masked_source import png

from vit_jax.data.augment import maps, segments
from vit_jax.data.images.decode import decode_map
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
MEAN = (124, 116, 104)  # 255 times ImageNet's .485, .456, .406
SHAPE = (78, 99)  # of the images
SIZE = (24, 40)


def example(seed=0):
  """Returns an image in which the colour of each pixel is its class."""
  rng = np.random.default_rng(seed)
  blocks = rng.integers(0, 3, (6, 9))
  classes = np.kron(blocks, np.ones((13, 11), int)).astype(np.uint8)
  return {'image': COLOURS[classes], 'label': 0, 'mask': png(classes)}


def transform(**keys):
  keys = dict(classes=3, distortion=False, max_share=1.0) | keys
  return segments.TrainTransform(SIZE, **keys)


def random(count):
  return (np.random.default_rng(seed) for seed in range(count))


def compared(cut, key, count):
  """Yields, of random results, the image, its map, and which pixels differ.

  The class of a pixel is that of its colour. Only colours that are not mixed by
  interpolation are compared.
  """
  for seed, rng in enumerate(random(count)):
    arrays = cut(example(seed), rng)
    image, ids = arrays['image'], arrays[key]
    assert image.shape == (*SIZE, 3)
    assert (ids.shape, ids.dtype) == cut.spec[key] and ids.shape == SIZE
    pure = (image.max(-1) > 250) & (ids != maps.IGNORED)
    yield image, ids, (image.argmax(-1) != ids)[pure]


CUTS = [
  maps.TrainTransform(SIZE, maps=('mask',), crop=crop, min_area=0.1)
  for crop in ('inception', 'torchvision', 'squash', 'pad', 'none')
] + [
  maps.EvalTransform(SIZE, maps=('mask',), resize=resize)
  for resize in ('squash', 'central', 'squash_central', 'torchvision')
]


@pytest.mark.parametrize('cut', CUTS)
def test_a_map_is_cut_like_its_image(cut):
  """Classes and colours agree, except next to edges."""
  differ = [each for *_, each in compared(cut, 'mask', 6)]
  assert min(map(len, differ)) > 0.3 * np.prod(SIZE)
  assert np.concatenate(differ).mean() < 0.005


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(mask=png(np.zeros((5, 7), np.uint8))), '(5, 7)'),
    (dict(mask=png(np.full(SHAPE, 9, np.uint8))), '9'),
    (dict(mask=png(np.zeros((*SHAPE, 3), np.uint8))), '[78, 99, 3]'),
    (dict(mask=np.zeros((*SHAPE, 3), np.uint8)), '[78, 99, 3]'),
    (dict(mask=b'\x89PNG\r\n\x1a\n'), ''),
    (dict(mask=np.zeros(SHAPE, np.float32)), 'float32'),
  ],
)
def test_bad_maps_are_bad_records(change, words):
  transform = maps.EvalTransform(SIZE, maps=('mask',), table=(0, 1, 2))
  with pytest.raises(DecodeError) as error:
    transform(example() | change)
  assert words in str(error.value)


@pytest.mark.parametrize('mode, dtype', [('L', 'u1'), ('P', 'u1'), ('I', 'u2')])
def test_maps_are_grey_or_have_a_palette(mode, dtype):
  """A palette's indices are the integers, not its colours."""
  scale = 300 if mode == 'I' else 7
  values = np.arange(12, dtype=dtype).reshape(3, 4) * scale
  image, file = PIL.Image.fromarray(values), io.BytesIO()
  if mode == 'P':
    image.putpalette([value % 256 for value in range(768)][::-1])
  image.save(file, 'png')
  np.testing.assert_array_equal(decode_map(file.getvalue()), values)
  np.testing.assert_array_equal(decode_map(values[..., None]), values)


def test_mask_and_image_have_the_same_scale_crop_and_flip():
  """Small images leave a border of the mean colour, which is ignored."""
  differ, borders = [], []
  for image, ids, different in compared(transform(), 'segments', 20):
    ignored = ids == maps.IGNORED
    assert np.abs(image[ignored] - np.array(MEAN)).max(initial=0) <= 1
    differ.append(different)
    borders.append(ignored.mean())
  assert np.concatenate(differ).mean() < 0.005
  assert min(borders) == 0 and max(borders) > 0.1


def test_scale_is_relative_to_the_shorter_side():
  """The shorter side is that of the crop times a number from .5 to 2."""
  cut, scales, corners, flips = transform(), [], [], []
  for rng in random(400):
    drawn = cut.geometry(60, 90, rng)
    assert drawn.size[1] == pytest.approx(1.5 * drawn.size[0], abs=1.5)
    scales.append(drawn.size[0] / min(SIZE))
    spare = max(drawn.size[0] - SIZE[0], 0)
    corners.append(drawn.corner[0] / spare if spare else 0)
    assert 0 <= drawn.corner[0] <= spare
    flips.append(drawn.flip)
  assert min(scales) == pytest.approx(0.5, abs=0.03)
  assert max(scales) == pytest.approx(2, abs=0.03)
  assert np.mean(scales) == pytest.approx(1.25, abs=0.07)  # uniform
  assert max(corners) == 1
  assert np.mean(flips) == pytest.approx(0.5, abs=0.08)
  assert not any(
    transform(flip=False).geometry(60, 90, r).flip for r in random(9)
  )


def test_crops_of_one_class_are_drawn_again():
  """The mask is class 0, except for a tenth at the right."""
  classes = np.zeros((60, 300), np.uint8)
  classes[:, 270:] = 1
  given = {'image': COLOURS[classes], 'label': 0, 'mask': png(classes)}

  def mixed(share):
    cut = transform(max_share=share, min_scale=1.0, max_scale=1.0)
    masks = [cut(given, rng)['segments'] for rng in random(100)]
    return np.mean([(mask == 0).mean() <= 0.75 for mask in masks])

  # The crop has 40 of 120 columns, and must begin in column 78 or later.
  once = 3 / 81
  assert mixed(1.0) == pytest.approx(once, abs=0.05)
  assert mixed(0.75) == pytest.approx(1 - (1 - once) ** 11, abs=0.12)


def test_integers_of_16_bits_tables_and_the_zero_label():
  """A table maps 300 + i to i; without the label 0, classes are one less."""
  plain = example()
  classes = np.asarray(PIL.Image.open(io.BytesIO(plain['mask'])))
  wide = plain | {'mask': png(classes.astype(np.uint16) + 300)}
  table = (255,) * 300 + (0, 1, 2)
  one = transform()(plain, np.random.default_rng(1))
  two = transform(table=table)(wide, np.random.default_rng(1))
  np.testing.assert_array_equal(one['segments'], two['segments'])
  reduced = transform(classes=2, reduce_zero_label=True)
  three = reduced(plain, np.random.default_rng(1))['segments']
  expected = np.where(one['segments'] < 1, maps.IGNORED, one['segments'] - 1)
  np.testing.assert_array_equal(three, expected)
  reduced = transform(classes=1, reduce_zero_label=True)
  with pytest.raises(DecodeError, match='contains 1 after table and reduce'):
    reduced(plain, np.random.default_rng(1))


def test_distortion_needs_rgb_of_8_bits():
  with pytest.raises(UserError, match=r'distortion.*bits is 16'):
    transform(distortion=True, bits=16)
  with pytest.raises(UserError, match='min_scale'):
    transform(min_scale=3.0)
