"""`digits`: scikit-learn's 1,797 handwritten digits as a TFDS dataset.

scikit-learn contains the images, so that a first run does not need a download.
Grey values of 8x8 pixels, 0 to 16, are stored as PNG with three equal channels
of 0 to 255. The last of every five images belongs to the test split: 1,438
examples for training, 359 for testing.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits",
UCI machine learning repository (its test set).
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
from etils import epath

from vit_jax.errors import UserError
from vit_jax.files import paths

NAME = 'digits'
_VERSION = '1.0.0'
NUM_TRAIN, NUM_TEST = 1_438, 359


def cache_dir(data_dir: epath.Path) -> epath.Path:
  """Returns the TFDS directory of the dataset if the user does not give one.

  Args:
    data_dir: default TFDS directory, which is used if the dataset is in it
      already.
  """
  if (data_dir / NAME / _VERSION / 'dataset_info.json').exists():
    return data_dir
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return paths.locate(f'{cache}/vit_jax/tfds')


def prepare(data_dir: epath.Path) -> None:
  """Prepares the dataset in `data_dir`, unless it exists.

  If several processes call it at the same time, one of them writes the dataset
  and the others wait.

  Args:
    data_dir: TFDS directory.

  Raises:
    UserError: the directory is not writable.
  """
  done = data_dir / NAME / _VERSION / 'dataset_info.json'
  if done.exists():
    return
  try:
    data_dir.mkdir(parents=True, exist_ok=True)
    with _lock(data_dir / f'.{NAME}.lock'):
      if not done.exists():
        _builder(data_dir).download_and_prepare(file_format='array_record')
  except OSError as error:
    raise UserError(
      f'the data set {NAME!r} cannot be written to {data_dir}: {error}. Set '
      'another --config.source.data_dir or TFDS_DATA_DIR.'
    ) from error


@contextlib.contextmanager
def _lock(path: epath.Path) -> Iterator[None]:
  """Holds a lock, which the system releases if the process is killed."""
  # Remote storage has no locks, but TFDS writes a dataset to a temporary
  # directory, which it renames when the dataset is complete.
  if paths.is_remote(path):
    yield
    return
  with path.open('w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _builder(data_dir: epath.Path) -> Any:
  """Returns the TFDS builder of the dataset."""
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()  # progress bars would fill the log

  # Registration is skipped, because a second one would fail if a process
  # prepares the dataset in two directories.
  class Digits(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """1,797 handwritten digits of 8x8 pixels."""

    name = NAME
    VERSION = tfds.core.Version(_VERSION)

    def _info(self):
      features = tfds.features.FeaturesDict(
        {
          'image': tfds.features.Image(shape=(8, 8, 3), encoding_format='png'),
          'label': tfds.features.ClassLabel(num_classes=10),
        }
      )
      return tfds.core.DatasetInfo(
        builder=self, description=self.__doc__, features=features
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {'train': self._examples(False), 'test': self._examples(True)}

    def _generate_examples(self):  # an abstract method of the base class
      raise NotImplementedError('see _split_generators')

    def _examples(self, test: bool):
      from sklearn.datasets import load_digits

      images, labels = load_digits(return_X_y=True)
      pixels = np.round(images.reshape(-1, 8, 8, 1) * (255 / 16))
      pixels = np.repeat(pixels.astype(np.uint8), 3, axis=-1)
      for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        if (i % 5 == 4) == test:
          yield i, {'image': _png(image), 'label': int(label)}

  return Digits(data_dir=str(data_dir), file_format='array_record')


def _png(image: np.ndarray) -> bytes:
  """Encodes an image to the same bytes as TFDS does with TensorFlow.

  A run therefore resumes after the dataset was prepared again without
  TensorFlow, or with it.
  """
  options = [cv2.IMWRITE_PNG_COMPRESSION, 6]
  options += [cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_FILTERED]
  options += [cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_ALL_FILTERS]
  return cv2.imencode('.png', image, options)[1].tobytes()
