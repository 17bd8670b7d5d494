"""Tests of multi-crop augmentation against torchvision and Pillow."""

import copy
import re
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps
from sample_images import encode, noise

from benchmarks.peers import import_timm
from vit_jax.data.augment import policies, transforms
from vit_jax.data.augment.multicrop import TrainTransform
from vit_jax.errors import UserError

import_timm()
import torchvision.transforms.functional as TF  # noqa: E402
from torchvision.transforms import RandomResizedCrop  # noqa: E402

PHOTOGRAPH = cv2.resize(noise(9, 12), (120, 90), interpolation=cv2.INTER_CUBIC)
IMAGES = {
  'photograph': PHOTOGRAPH,
  'noise': noise(41, 53),
  'flat': np.full((9, 8, 3), (3, 100, 255), np.uint8),
  'grey': np.repeat(noise(20, 20, 0)[..., None], 3, axis=2),
}


def numbers(picture):
  return np.array(picture).astype(int)


@pytest.mark.parametrize('image', IMAGES.values(), ids=IMAGES)
def test_hue_equals_torchvision(image):
  """Results are bitwise equal, with 8 bits of hue, saturation and value."""
  for turn in (-0.5, -0.1, -0.034, 0.0, 0.07, 0.1, 0.5):
    expected = numbers(TF.adjust_hue(Image.fromarray(image), turn))
    np.testing.assert_array_equal(policies.hue(image, turn), expected)


def test_blur_equals_three_box_means():
  """The checksum is that of box means computed in integers."""
  checksum = 0
  for name in ('noise', 'flat', 'grey'):
    for sigma in (0.1, 0.37, 0.5, 1.0, 1.234, 2.0, 4.5):
      blurred = policies.soften(IMAGES[name], sigma)
      checksum = zlib.crc32(blurred.tobytes(), checksum)
  assert checksum == 0xC64243DE


def test_color_jitter_equals_torchvision():
  """With equal factors and order, only the rounding of each part differs."""
  strengths = 0.4, 0.4, 0.2, 0.1
  names = 'brightness', 'contrast', 'saturation', 'hue'
  orders = set()
  for seed in range(20):
    ours = policies.jitter(PHOTOGRAPH, strengths, np.random.default_rng(seed))
    rng, picture = np.random.default_rng(seed), Image.fromarray(PHOTOGRAPH)
    order = rng.permutation(4)
    for index in order:
      middle = 0 if names[index] == 'hue' else 1
      factor = middle + rng.uniform(-1, 1) * strengths[index]
      picture = getattr(TF, f'adjust_{names[index]}')(picture, factor)
    orders.add(tuple(order))
    gap = np.abs(ours - numbers(picture))
    # Each of the first three differs by up to two levels; hue amplifies this.
    assert np.mean(gap) < 1 and np.mean(gap <= 4) > 0.99
  assert len(orders) > 10


def test_boxes_have_torchvisions_distribution():
  """Areas, aspect ratios and positions of many boxes have equal quantiles."""
  import torch

  torch.manual_seed(0)
  rng, area, ratio = np.random.default_rng(0), [0.05, 0.4], [3 / 4, 4 / 3]
  picture = Image.fromarray(PHOTOGRAPH)
  draws = {
    'ours': lambda: transforms.random_box(90, 120, tuple(area), rng),
    'theirs': lambda: RandomResizedCrop.get_params(picture, area, ratio),
  }
  figures = []
  for draw in draws.values():
    y, x, h, w = np.array([draw() for _ in range(4000)]).T
    figures.append((h * w, np.log(w / h), y / (91 - h), x / (121 - w)))
  for ours, theirs in zip(*figures, strict=True):
    shares = np.linspace(0.02, 0.98, 25)
    first, second = np.quantile(ours, shares), np.quantile(theirs, shares)
    # The quantiles of 4000 draws are off by 1.6 % of the range (two sigmas)
    assert np.abs(first - second).max() < 0.05 * np.ptp(theirs)
  for height, width in ((10, 400), (400, 10), (1, 50), (50, 1)):
    long = Image.fromarray(noise(height, width))
    expected = RandomResizedCrop.get_params(long, [1.0, 1.0], ratio)
    assert transforms.random_box(height, width, (1.0, 1.0), rng) == expected


def by_pillow(picture, size, area, rng, *, blur, solarize):
  """Computes a view in the order of DINO's code, without colour jitter."""
  box = transforms.random_box(*picture.size[::-1], area, rng)
  bicubic = TF.InterpolationMode.BICUBIC
  view = TF.resized_crop(picture, *box, list(size), interpolation=bicubic)
  if rng.random() < 0.5:
    view = ImageOps.mirror(view)
  if rng.random() < 0.8:
    rng.permutation(4), rng.uniform(size=4)
    view = TF.adjust_hue(view, 0.0)  # eight bits of hue are not the identity
  if rng.random() < 0.2:
    view = view.convert('L').convert('RGB')
  if rng.random() < blur:
    view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2)))
  if solarize and rng.random() < 0.2:
    view = ImageOps.solarize(view)
  return numbers(view)


def test_views_equal_pillow():
  """Operations are applied in order, with draws of a single generator."""
  transform = TrainTransform(
    (32, 24), local_crops=3, local_size=(16,), color_jitter=(0, 0, 0, 0)
  )
  picture = Image.fromarray(PHOTOGRAPH)
  for seed in range(25):
    rng = np.random.default_rng(seed)
    again = copy.deepcopy(rng)
    crops = transform({'image': PHOTOGRAPH}, rng)
    views = [
      ('global', 0, (32, 24), (0.4, 1.0), 1.0, False),
      ('global', 1, (32, 24), (0.4, 1.0), 0.1, True),
      *(('local', i, (16, 16), (0.05, 0.4), 0.5, False) for i in range(3)),
    ]
    for key, index, size, area, blur, solarize in views:
      expected = by_pillow(
        picture, size, area, again, blur=blur, solarize=solarize
      )
      # Luma differs by up to one level, and is blurred afterwards
      assert np.abs(crops[key][index] - expected).max() <= 2


def test_crops_depend_on_settings_and_generator_only():
  file = {'image': encode(PHOTOGRAPH, '.png')}
  transform = TrainTransform((24, 32), local_crops=10, local_size=(12, 8))
  first, again, other = (
    transform(file, np.random.default_rng(seed)) for seed in (0, 0, 1)
  )
  shapes = {'global': (2, 24, 32, 3), 'local': (10, 12, 8, 3)}
  for name, shape in shapes.items():
    assert transform.spec[name] == (shape, np.uint8) and name in first
    assert first[name].shape == shape and first[name].dtype == np.uint8
    np.testing.assert_array_equal(first[name], again[name])
    assert np.abs(first[name] - other[name].astype(int)).mean() > 5
  two = TrainTransform((24, 32), local_crops=0)
  crops = two(file, np.random.default_rng(0))
  assert two.spec.keys() == crops.keys() == {'global'}


@pytest.mark.parametrize(
  'key, value, allowed',
  [
    ('global_area', (0.5, 0.2), '<= 1'),
    ('local_area', (0.1,), '<= 1'),
    ('blur', (0.5,), '3 numbers'),
    ('blur', (2.0, 0.1, 0.1), r'at most \(1'),
    ('color_jitter', (0.4, 0.4, 0.2, 0.6), '0.5'),
    ('solarize', -0.1, ''),
    ('local_crops', -1, ''),
    ('local_size', (1, 2, 3), ''),
  ],
)
def test_invalid_settings(key, value, allowed):
  message = rf'augment\.{key}.*{re.escape(str(value))}.*{allowed}'
  with pytest.raises(UserError, match=message):
    TrainTransform((8, 8), **{key: value})
