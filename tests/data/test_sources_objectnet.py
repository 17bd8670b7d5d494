"""Tests of the source `objectnet` on an invented directory of that layout."""

import collections
import itertools
import pathlib
import pickle

import cv2
import numpy as np
import pytest

from vit_jax.data import filters
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import objectnet
from vit_jax.errors import UserError

# Classes with several ImageNet classes, and others, by WordNet id; from the
# names in ObjectNet's objectnet_to_imagenet_1k.json.
SEVERAL = {
  'alarm_clock': ['n02708093', 'n03196217'],
  'bicycle': ['n02835271', 'n03792782'],
  'chair': ['n02791124', 'n03376595', 'n04099969'],
  'helmet': ['n03127747', 'n03379051'],
  'pen': ['n02783161', 'n03388183', 'n04033901'],
  'skirt': ['n03534580', 'n03770439', 'n03866082'],
  'still_camera': ['n03976467', 'n04069434'],
  'tie': ['n02883205', 'n04591157'],
  'wheel': ['n02974003', 'n03874293'],
}
ONE = {
  'banana': ['n07753592'],
  'full_sized_towel': ['n02808304'],
  't-shirt': ['n03595614'],
  'toilet_paper_roll': ['n15075141'],
  'wok': ['n04596742'],
}
RED = (0, 0, 255)  # blue, green, red, as in OpenCV


def write(folder, images=1, size=(5, 4)):
  """Writes the images of all classes, and of two that ImageNet lacks."""
  root = pathlib.Path(folder) / 'objectnet-1.0/images'
  names = sorted([*objectnet.IMAGENET_CLASSES, 'air_freshener', 'zipper'])
  for number, name in enumerate(names):
    (root / name).mkdir(parents=True)
    for image in range(images):
      pixels = np.full((*size, 3), (image, 7, number), np.uint8)
      pixels[[0, -1]], pixels[:, [0, -1]] = RED, RED
      cv2.imwrite(str(root / name / f'{image}.png'), pixels)
  return root


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  """Returns a data_dir with four images of each class."""
  folder = tmp_path_factory.mktemp('data')
  write(folder, images=4)
  return folder


def opened(folder, split='test'):
  return objectnet.Source(split, data_dir=str(folder))


def test_classes_are_those_of_the_authors():
  """113 classes correspond to 125 classes of ImageNet, none of them twice."""
  several = objectnet.IMAGENET_CLASSES.values()
  labels = list(itertools.chain(*several))
  assert len(several) == 113 and len(labels) == len(set(labels)) == 125
  assert set(labels) <= set(range(1_000))
  names = {k for k, v in objectnet.IMAGENET_CLASSES.items() if len(v) > 1}
  assert names == set(SEVERAL)


@pytest.mark.slow
def test_images_of_overlapping_classes_without_border(directory):
  """Each has all of its ImageNet classes as labels."""
  source = opened(directory)
  assert len(source) == 4 * 113 and source.num_classes == 1_000
  assert source.class_names == sorted(source.class_names)
  found = collections.defaultdict(list)
  for index in range(len(source)):
    example, place = source[index], pathlib.Path(source.where(index))
    assert place.exists()
    assert example['image'].shape == (3, 2, 3)
    assert set(example['image'][..., 1].flat) == {7}
    names = [source.class_names[i] for i in example['imagenet_labels']]
    assert example['label'] == example['imagenet_labels'][0]
    found[place.parent.name].append(names)
  assert len(found) == 113 and not {'air_freshener', 'zipper'} & set(found)
  for name, expected in (SEVERAL | ONE).items():
    assert found[name] == [expected] * 4, name
  copied = pickle.loads(pickle.dumps(source))
  np.testing.assert_array_equal(copied[9]['image'], source[9]['image'])
  assert source.fingerprint == copied.fingerprint
  with pytest.raises(IndexError):
    source[452]


@pytest.mark.slow
def test_parts_contain_every_class(directory):
  whole, *parts = (
    {source.where(i) for i in range(len(source))}
    for source in (
      opened(directory, split) for split in ('test', 'test[:25%]', 'test[25%:]')
    )
  )
  assert [len(part) for part in parts] == [113, 339]
  assert len({pathlib.Path(each).parent for each in parts[0]}) == 113
  assert parts[0] | parts[1] == whole


@pytest.mark.slow
def test_heads_with_the_classes_in_another_order(directory):
  """All labels are mapped by name."""
  source = opened(directory)
  names = [*reversed(source.class_names), 'other']
  mapped = filters.matched(source, names, 'the head')
  labels = mapped[0]['imagenet_labels']
  assert [names[i] for i in labels] == SEVERAL['alarm_clock']


@pytest.mark.slow
def test_messages_of_wrong_directories_and_images(tmp_path):
  root = write(tmp_path)
  source, image = opened(tmp_path), root / 'alarm_clock/0.png'
  cv2.imwrite(str(image), np.zeros((2, 9, 3), np.uint8))
  with pytest.raises(DecodeError, match='2, 9, 3.*border'):
    source[0]
  image.write_bytes(b'no image')
  with pytest.raises(DecodeError):
    source[0]
  (root / 'wok/0.png').rename(root / 'wok/0.jpg')
  for folder, words in (
    (tmp_path / 'wok', r'objectnet-1\.0.*data_dir'),
    ('gs://bucket/data', r'gs://bucket.*local'),
    (tmp_path, r"\['wok'\].*objectnet-1\.0\.zip"),
  ):
    with pytest.raises(UserError, match=words):
      opened(folder)
