"""Tasks of VTAB-1k whose labels are computed from other features.

The labels of five of the 19 tasks are not features of the TFDS datasets, but
counts, distances, and positions in fewer bins. The definitions are those of
VTAB's code (google-research/task_adaptation, `data/clevr.py`, `data/kitti.py`
and `data/dsprites.py`); the paper of VTAB is arXiv 1910.04867.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import tfds
from vit_jax.data.storage import records
from vit_jax.errors import UserError, check_choice

Features = Mapping[str, Any]  # features of a tf.train.Example, by name
# Lower bounds of the classes: a distance belongs to the last class whose bound
# it exceeds.
_CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)
_KITTI_DISTANCES_M = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE_M = 1000.0  # distance if there is no vehicle
_VEHICLES = 3  # the first classes of `objects/type`: Car, Van, Truck
_BINS = 16  # classes of the tasks of dSprites


class Task(NamedTuple):
  """A task of VTAB.

  Attributes:
    dataset: TFDS name.
    needs: feature from which the label is computed.
    class_names: names of the classes.
    label: function from the features of an example to its label.
    binary: whether the pixels of the stored images are 0 and 1, not 0 to 255.
  """

  dataset: str
  needs: str
  class_names: tuple[str, ...]
  label: Callable[[Features], int]
  binary: bool = False


def _threshold(distance: np.float32, thresholds: tuple[float, ...]) -> int:
  """Returns the index of the last threshold below a distance, -1 if none is."""
  sorted_thresholds = np.asarray(thresholds, np.float32)
  return int(np.searchsorted(sorted_thresholds, distance, 'left')) - 1


def _clevr_count(features: Features) -> int:
  """Returns the class of the number of objects, which is 3 to 10."""
  return len(features['objects/size'].int64_list.value) - 3


def _clevr_distance(features: Features) -> int:
  """Returns the class of the distance of the nearest object."""
  # [objects, 3]: the two coordinates in the image, and the depth.
  coordinates = features['objects/pixel_coords'].float_list.value
  depth = np.float32(coordinates).reshape(-1, 3)[:, 2]
  return _threshold(depth.min(), _CLEVR_DISTANCES)


def _kitti_distance(features: Features) -> int:
  """Returns the class of the distance of the nearest vehicle."""
  kinds = np.array(features['objects/type'].int64_list.value, np.int64)
  # [objects, 3]: x, y and z in the coordinates of the camera, metres.
  location = features['objects/location'].float_list.value
  depth = np.float32(location).reshape(-1, 3)[:, 2]
  vehicles = depth[kinds < _VEHICLES]
  return _threshold(
    vehicles.min(initial=np.float32(_NO_VEHICLE_M)), _KITTI_DISTANCES_M
  )


def _dsprites(feature: str, size: int, word: str) -> Task:
  """Returns a task of dSprites, which divides a feature's classes into 16 bins.

  Args:
    feature: name of the feature.
    size: number of its classes.
    word: name of the bins.
  """

  def label(features: Features) -> int:
    [value] = features[feature].int64_list.value
    return value * _BINS // size

  names = tuple(f'{word} {i} of {_BINS}' for i in range(1, _BINS + 1))
  return Task('dsprites', feature, names, label, binary=True)


TASKS = {
  'clevr_count': Task(
    'clevr',
    'objects',
    tuple(f'{count} objects' for count in range(3, 11)),
    _clevr_count,
  ),
  'clevr_distance': Task(
    'clevr',
    'objects',
    tuple(f'distance above {d}' for d in _CLEVR_DISTANCES),
    _clevr_distance,
  ),
  'kitti': Task(
    'kitti',
    'objects',
    ('up to 8 m', '8 to 20 m', 'above 20 m', 'no vehicle'),
    _kitti_distance,
  ),
  'dsprites_location': _dsprites('label_x_position', 32, 'column'),
  'dsprites_orientation': _dsprites('label_orientation', 40, 'orientation'),
}


@schema.operational('data_dir')
class Source(tfds.Records):
  """One split of a task of VTAB.

  Attributes:
    name: name for messages, such as 'kitti/train'.
    num_classes: number of classes.
    class_names: names of the classes, in the order of the labels.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    task: str,
    data_dir: str | None = None,
    on_bad_shard: str = 'error',
  ):
    """Opens a split of the task's TFDS dataset.

    Args:
      split: split as in TFDS: 'train[:800]', 'test'.
      task: 'clevr_count', 'clevr_distance', 'kitti', 'dsprites_location' or
        'dsprites_orientation'.
      data_dir: see `sources.tfds.Source`.
      on_bad_shard: see `sources.tfds.Source`.

    Raises:
      UserError: `task` is unknown, or its dataset is not prepared or lacks a
        feature; see `sources.tfds.Source`.
    """
    check_choice('source.task', task, TASKS)
    self._task = task
    super().__init__(TASKS[task].dataset, split, data_dir, on_bad_shard)
    needs = TASKS[task].needs
    if needs not in self.features:
      raise UserError(
        f'{self.name} has the features {", ".join(self.features)}, and not '
        f'{needs!r}, which source.task={task!r} needs: prepare it again.'
      )
    self.name = f'{task}/{split}'
    self.class_names = list(TASKS[task].class_names)
    self.num_classes = len(self.class_names)

  def __getitem__(self, index: int) -> dict[str, Any]:
    task = TASKS[self._task]
    features = records.features(self.read(index))
    try:
      [image] = features['image'].bytes_list.value
      label = task.label(features)
    except (IndexError, ValueError) as error:  # no image or object, wrong shape
      raise DecodeError(f'no label for {self._task}: {error}') from error
    return {
      'image': decode(image) * np.uint8(255) if task.binary else image,
      'label': label,
    }
