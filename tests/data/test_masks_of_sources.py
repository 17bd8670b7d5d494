"""Tests that masks of every kind of source give the same classes."""

import cv2
import numpy as np
import pytest

from examples import shapes
from tests import archives, shapes_folder
from vit_jax.data.augment import segments
from vit_jax.data.sources import folder, huggingface, manifest, tar, tfds

COUNT = 3


def files():
  """Returns an image and a mask for each example, PNG files."""
  found = []
  for example in map(shapes.Source('train').__getitem__, range(COUNT)):
    pixels = cv2.cvtColor(example['image'], cv2.COLOR_RGB2BGR)
    found.append(
      (cv2.imencode('.png', pixels)[1].tobytes(), example['segments'])
    )
  return found


def of_folder(path):
  shapes_folder.write(path, COUNT)
  masks = f'{path}/annotations'
  return folder.Source('train', path=f'{path}/images', masks=masks), 'mask'


def of_manifest(path):
  shapes_folder.write(path, COUNT)
  lines = [
    f'images/train/{i}.png,annotations/train/{i}.png' for i in range(COUNT)
  ]
  (path / 'list.csv').write_text('\n'.join(['image,mask', *lines]))
  listed = str(path / 'list.csv')
  return manifest.Source('train', path=listed, files=('mask',)), 'mask'


def of_tar(path):
  members = {}
  for i, (image, mask) in enumerate(files()):
    members |= {f'{i}.png': image, f'{i}.seg.png': mask}
  (path / '000.tar').write_bytes(archives.tar(members))
  keys = dict(label_key=None, others=('seg.png',))
  return tar.Source('train', path=str(path), **keys), 'seg.png'


def of_huggingface(path):
  hf = pytest.importorskip('datasets')
  kind = hf.Features({'image': hf.Image(), 'mask': hf.Image()})
  rows = [
    {'image': {'bytes': image}, 'mask': {'bytes': mask}}
    for image, mask in files()
  ]
  hf.Dataset.from_list(rows, features=kind).to_parquet(path / 'train.parquet')
  keys = dict(label_key=None, others=('mask',))
  return huggingface.Source('train', path=str(path), **keys), 'mask'


def of_tfds(path):
  lib = pytest.importorskip('tensorflow_datasets')

  class Pets(lib.core.GeneratorBasedBuilder):
    VERSION = lib.core.Version('1.0.0')

    def _info(self):
      image = lib.features.Image(encoding_format='png')
      mask = lib.features.Image(shape=(None, None, 1), encoding_format='png')
      label = lib.features.ClassLabel(num_classes=2)
      keys = dict(image=image, label=label, segmentation_mask=mask)
      return lib.core.DatasetInfo(
        builder=self, features=lib.features.FeaturesDict(keys)
      )

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i, example in enumerate(
        map(shapes.Source('train').__getitem__, range(COUNT))
      ):
        mask = cv2.imdecode(
          np.frombuffer(example['segments'], np.uint8), cv2.IMREAD_UNCHANGED
        )
        yield (
          i,
          dict(
            image=example['image'], label=0, segmentation_mask=mask[..., None]
          ),
        )

  Pets(data_dir=str(path), file_format='array_record').download_and_prepare()
  name = 'segmentation_mask'
  keys = dict(dataset='pets', data_dir=str(path), others=(name,))
  return tfds.Source('train', **keys), name


@pytest.mark.parametrize(
  'opened',
  [
    of_folder,
    of_manifest,
    of_tar,
    pytest.param(of_huggingface, marks=pytest.mark.slow),
    pytest.param(of_tfds, marks=pytest.mark.slow),
  ],
)
def test_masks_of_sources(opened, tmp_path):
  """They become classes by a table: the background is ignored."""
  source, key = opened(tmp_path)
  transform = segments.EvalTransform(
    (64, 64), classes=2, key=key, table=(255, 0, 1), resize='squash'
  )
  plain = shapes.Source('train')
  found = [transform(source[i], None) for i in range(len(source))]
  assert len(found) == COUNT

  def same(one, example):
    mask = cv2.imdecode(
      np.frombuffer(example['segments'], np.uint8), cv2.IMREAD_UNCHANGED
    )
    whole = np.array_equal(one['segments'], mask.astype(int) - 1)
    return whole and np.array_equal(one['image'], example['image'])

  # The order is that of the source.
  for i in range(COUNT):
    assert sum(same(one, plain[i]) for one in found) == 1
