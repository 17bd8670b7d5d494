"""A small TFDS dataset, prepared in several formats."""

import numpy as np
import tensorflow_datasets as tfds_lib

from vit_jax.data.sources import tfds


class Twin(tfds_lib.core.GeneratorBasedBuilder):
  """A dataset with more features than the source reads by default."""

  VERSION = tfds_lib.core.Version('1.0.0')

  def _info(self):
    kinds = tfds_lib.features
    label = kinds.ClassLabel(names=['cat', 'cow', 'dog'])
    features = dict(
      image=kinds.Image(encoding_format='png'),
      label=label,
      coarse=kinds.ClassLabel(num_classes=2),
      several=kinds.Sequence(label),
      file_name=kinds.Text(),
      even=kinds.Scalar(np.bool_),
      number=kinds.Scalar(np.uint8),
    )
    return tfds_lib.core.DatasetInfo(
      builder=self, features=kinds.FeaturesDict(features)
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    sizes = {'train': 40, 'test': 7}
    return {split: self._generate_examples(n) for split, n in sizes.items()}

  def _generate_examples(self, number):
    for i in range(number):
      pixels = np.random.default_rng(i).integers(0, 256, (5, 4 + i % 3, 3))
      yield (
        i,
        dict(
          image=pixels.astype(np.uint8),
          label=i % 3,
          coarse=i % 2,
          several=list(range(i % 4)),
          file_name=f'{i}.png',
          even=i % 2 == 0,
          number=i,
        ),
      )


def open_twin(folder, split='train', **settings):
  settings = dict(dataset='twin', data_dir=str(folder)) | settings
  return tfds.Source(split, **settings)
