"""Tests that common examples of two splits are counted for every source."""

import contract
import numpy as np
import pytest

from vit_jax.data import inspection
from vit_jax.data.filters import matched
from vit_jax.data.sources import folder, manifest, mixture, tfds


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """Creates sixty images of two classes as a folder and as a manifest."""
  root = tmp_path_factory.mktemp('images')
  lines = ['image,label']
  for i in range(60):
    path = root / 'photos' / 'ab'[i % 2] / f'{i:02d}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contract.png(i))
    lines.append(f'{path},{i % 2}')
  (root / 'list.csv').write_text('\n'.join(lines))
  return root


def sources(root):
  """Returns functions that open a split of each kind of source."""
  photos = f'{root}/photos'
  digits = dict(dataset='digits', data_dir=f'{root}/tfds')
  listed = dict(path=f'{root}/list.csv')
  member = dict(name='manifest', weight=1.0, **listed)
  return {
    'folder': lambda split: folder.Source(split, path=photos),
    'manifest': lambda split: manifest.Source(split, **listed),
    'tfds': lambda split: tfds.Source(split, **digits),
    'mixture': lambda split: mixture.Source(split, members=dict(one=member)),
    'matched': lambda split: matched(
      folder.Source(split, path=photos), ['b', 'a'], 'weights'
    ),
  }


@pytest.mark.parametrize('name', sources('').keys())
def test_overlap_of_parts_of_a_split(root, name):
  """The count is 0 for disjoint parts and exact for overlapping parts."""
  open_split = sources(root)[name]
  whole, first, last = map(open_split, ('train', 'train[:50%]', 'train[50%:]'))
  assert inspection.count(first, last) == 0
  assert inspection.count(whole, last) == len(last) > 0
  assert inspection.count(whole, whole) == len(whole)
  middle = open_split('train[25%:75%]')
  shared = inspection.count(first, middle) + inspection.count(middle, last)
  assert shared == len(middle)


def test_overlap_of_a_source_without_rows_is_unknown():
  class Unknown:
    name, num_classes, class_names = 'unknown', 1, ['a']

    def __len__(self):
      return 3

    def __getitem__(self, index):
      return {'image': np.zeros((2, 2, 3), np.uint8), 'label': 0}

  assert inspection.count(Unknown(), Unknown()) == 0
