"""Tests of labels of VTAB-1k that are computed from other features."""

import numpy as np
import pytest
import tensorflow_datasets as tfds_lib

from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import vtab
from vit_jax.errors import UserError

FEATURES = tfds_lib.features
COORDINATES = FEATURES.Tensor(shape=(3,), dtype=np.float32)


def _classes(count):
  return FEATURES.ClassLabel(num_classes=count)


CLEVR_OBJECTS = FEATURES.Sequence(
  {'size': _classes(2), 'pixel_coords': COORDINATES}
)


def _prepare(folder, name, features, examples, image=(8, 8, 3)):
  """Writes examples as a TFDS dataset of that name."""
  features['image'] = FEATURES.Image(shape=image, encoding_format='png')
  pixels = np.arange(np.prod(image)).reshape(image) % 2
  examples = [each | {'image': pixels.astype(np.uint8)} for each in examples]
  tfds_lib.dataset_builders.store_as_tfds_dataset(
    name=name,
    version='1.0.0',
    features=FEATURES.FeaturesDict(features),
    split_datasets={'train': list(enumerate(examples))},
    data_dir=folder,
    disable_shuffling=True,
    file_format='array_record',
  )


def _labels(folder, task):
  source = vtab.Source('train', task=task, data_dir=str(folder))
  return source, [source[i]['label'] for i in range(len(source))]


# The labels below were computed by VTAB's own functions for these records.
CLEVR_DEPTHS = [7.9, 8.0, 8.1, 8.5, 8.75, 9.1, 9.5, 9.9, 10.0, 10.4]
CLEVR_DISTANCE = [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
CLEVR_COUNT = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
# (types, depths) of the objects; 0, 1, 2 are vehicles.
KITTI = [
  ([0, 3], [8.0, 2.0]),
  ([1, 2], [30.0, 8.5]),
  ([2], [20.0]),
  ([5, 0], [1.0, 20.5]),
  ([3, 7], [5.0, 12.0]),
  ([0], [-3.0]),
]
KITTI_DISTANCE = [0, 1, 1, 2, 3, 0]
ORIENTATIONS = [0, 2, 3, 5, 7, 8, 19, 20, 38, 39]
ORIENTATION_BINS = [0, 0, 1, 2, 2, 3, 7, 8, 15, 15]
COLUMNS = [0, 1, 2, 3, 15, 16, 17, 29, 30, 31]
COLUMN_BINS = [0, 0, 1, 1, 7, 8, 8, 14, 15, 15]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Returns a TFDS directory with small versions of the three datasets."""
  root = tmp_path_factory.mktemp('tfds')
  clevr = []
  for i, depth in enumerate(CLEVR_DEPTHS):
    depths = [20.0] * (i % 8 + 3)
    depths[i % 3] = depth  # the nearest object is not always the first
    coordinates = [[1.0, 2.0, each] for each in depths]
    objects = {'size': [i % 2] * len(depths), 'pixel_coords': coordinates}
    clevr.append({'objects': objects})
  _prepare(root, 'clevr', {'objects': CLEVR_OBJECTS}, clevr)
  kitti = [
    {'objects': {'type': kinds, 'location': [[9.0, 9.0, z] for z in depths]}}
    for kinds, depths in KITTI
  ]
  objects = {'type': _classes(8), 'location': COORDINATES}
  _prepare(root, 'kitti', {'objects': FEATURES.Sequence(objects)}, kitti)
  dsprites = [
    {'label_orientation': angle, 'label_x_position': column}
    for angle, column in zip(ORIENTATIONS, COLUMNS, strict=True)
  ]
  labels = {'label_orientation': _classes(40), 'label_x_position': _classes(32)}
  _prepare(root, 'dsprites', labels, dsprites, image=(8, 8, 1))
  return root


@pytest.mark.parametrize(
  'task, expected, num_classes',
  [
    ('clevr_count', CLEVR_COUNT, 8),
    ('clevr_distance', CLEVR_DISTANCE, 6),
    ('kitti', KITTI_DISTANCE, 4),
    ('dsprites_orientation', ORIENTATION_BINS, 16),
    ('dsprites_location', COLUMN_BINS, 16),
  ],
)
def test_labels_equal_those_of_vtab(folder, task, expected, num_classes):
  """Thresholds belong to the class below them; bins have equal widths."""
  source, labels = _labels(folder, task)
  assert labels == expected
  assert source.num_classes == len(set(source.class_names)) == num_classes
  assert source.name == f'{task}/train'


def test_images_of_dsprites_are_black_and_white(folder):
  """Pixels are stored as 0 and 1; as such, all images would look black."""
  source, _ = _labels(folder, 'dsprites_location')
  assert set(np.unique(decode(source[0]['image']))) == {0, 255}
  source, _ = _labels(folder, 'kitti')
  assert set(np.unique(decode(source[0]['image']))) == {0, 1}


@pytest.mark.parametrize('task', ['clevr_distance', 'kitti'])
def test_records_with_too_few_values_are_bad(tmp_path, task):
  """Without objects, or with fewer locations than objects."""
  record = {'size': [], 'pixel_coords': []}
  features = CLEVR_OBJECTS
  if task == 'kitti':
    record = {'type': [0, 0], 'location': [[9.0, 9.0, 9.0]]}
    kinds = FEATURES.Sequence(_classes(8))
    locations = FEATURES.Sequence(COORDINATES)
    features = FEATURES.FeaturesDict({'type': kinds, 'location': locations})
  name = task.partition('_')[0]
  _prepare(tmp_path, name, {'objects': features}, [{'objects': record}])
  source = vtab.Source('train', task=task, data_dir=str(tmp_path))
  with pytest.raises(DecodeError, match=task):
    source[0]


def test_wrong_tasks_and_datasets_are_refused(folder, tmp_path):
  with pytest.raises(UserError, match=r"source\.task is 'clevr'.*clevr_count"):
    vtab.Source('train', task='clevr', data_dir=str(folder))
  _prepare(tmp_path, 'kitti', {'label': _classes(2)}, [{'label': 1}])
  with pytest.raises(UserError, match="'objects'.*'kitti'"):
    vtab.Source('train', task='kitti', data_dir=str(tmp_path))
