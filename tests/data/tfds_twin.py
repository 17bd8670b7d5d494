"""A small TFDS dataset, prepared in several formats."""

import numpy as np
import tensorflow_datasets as tfds_lib


class Twin(tfds_lib.core.GeneratorBasedBuilder):
  """A small dataset with more features than the source reads."""

  VERSION = tfds_lib.core.Version('1.0.0')

  def _info(self):
    return tfds_lib.core.DatasetInfo(
      builder=self,
      features=tfds_lib.features.FeaturesDict(
        {
          'image': tfds_lib.features.Image(encoding_format='png'),
          'label': tfds_lib.features.ClassLabel(names=['cat', 'cow', 'dog']),
          'coarse': tfds_lib.features.ClassLabel(num_classes=2),
          'several': tfds_lib.features.Sequence(
            tfds_lib.features.ClassLabel(names=['cat', 'cow', 'dog'])
          ),
          'file_name': tfds_lib.features.Text(),
          'even': tfds_lib.features.Scalar(np.bool_),
          'number': tfds_lib.features.Scalar(np.uint8),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {
      'train': self._generate_examples(40),
      'test': self._generate_examples(7),
    }

  def _generate_examples(self, number):
    for i in range(number):
      pixels = np.random.default_rng(i).integers(0, 256, (5, 4 + i % 3, 3))
      yield (
        i,
        {
          'image': pixels.astype(np.uint8),
          'label': i % 3,
          'coarse': i % 2,
          'several': list(range(i % 4)),
          'file_name': f'{i}.png',
          'even': i % 2 == 0,
          'number': i,
        },
      )
