"""Tests of images without labels, as MAE, DINO and masked patches use them."""

import io
import json
import tarfile

import contract
import numpy as np
import pytest
from minimal_config import completed

from vit_jax import check_data
from vit_jax.data.sources import folder, manifest, tar
from vit_jax.data.storage.class_folders import UNLABELLED
from vit_jax.errors import UserError
from vit_jax.training import data

COUNT = 6


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """Writes the same images as a folder, as two lists and as a tar shard."""
  root = tmp_path_factory.mktemp('data')
  (root / 'photos').mkdir()
  names = [f'{i}.png' for i in range(COUNT)]
  for i, name in enumerate(names):
    (root / 'photos' / name).write_bytes(contract.png(i))
  (root / 'photos' / 'notes.txt').write_text('not an image')
  paths = [f'photos/{name}' for name in names]
  (root / 'list.csv').write_text('\n'.join(['image', *paths]))
  lines = [json.dumps({'image': path, 'split': 'train'}) for path in paths]
  (root / 'list.jsonl').write_text('\n'.join(lines))
  with tarfile.open(root / 'train-0.tar', 'w') as file:
    for name in names:
      content = (root / 'photos' / name).read_bytes()
      info = tarfile.TarInfo(name)
      info.size = len(content)
      file.addfile(info, io.BytesIO(content))
  return root


SOURCES = {
  'folder': dict(name='folder', path='photos'),
  'csv': dict(name='manifest', path='list.csv'),
  'jsonl': dict(name='manifest', path='list.jsonl'),
  'tar': dict(name='tar', path='train-0.tar', label_key=None),
}
MODULES = {'folder': folder, 'manifest': manifest, 'tar': tar}


def section(root, kind):
  values = SOURCES[kind]
  return values | {'path': f'{root}/{values["path"]}'}


@pytest.mark.parametrize('kind', SOURCES)
def test_all_images_are_of_one_class(root, kind):
  """It has a name by which commands recognize data without labels."""
  settings = section(root, kind)
  source = MODULES[settings.pop('name')].Source('train', **settings)
  expected = [(contract.png(i), 0) for i in range(COUNT)]
  contract.check(source, expected, [])
  assert source.class_names == [UNLABELLED] and source.num_classes == 1
  np.testing.assert_array_equal(source.labels(), np.zeros(COUNT))


def test_a_folder_without_labels_is_not_divided_for_a_classifier(root):
  with pytest.raises(UserError, match='photos has no labels'):
    folder.divide(f'{root}/photos')


@pytest.mark.parametrize('kind', SOURCES)
def test_only_objectives_without_labels_train_on_them(root, kind):
  train = {'train.num_examples': COUNT, 'source': section(root, kind)}
  opened = data.open_train(completed(num_classes=0, **train))
  assert len(opened) == COUNT
  with pytest.raises(
    UserError, match='no labels, but a classifier.*objective=mae'
  ):
    data.open_train(completed(num_classes=10, **train))


def test_a_prepared_dataset_can_be_read_without_its_labels(prepared):
  from vit_jax.data.sources import tfds

  settings = dict(dataset='twin', data_dir=str(prepared['array_record']))
  labelled = tfds.Source('train', **settings)
  source = tfds.Source('train', label_key=None, **settings)
  assert source.class_names == [UNLABELLED] and len(source) == len(labelled)
  for i in range(len(source)):
    assert source[i] == labelled[i] | {'label': 0}


def test_check_data_reads_a_source_without_labels(tmp_path):
  """Its examples have no label at all."""
  config = completed(
    source=dict(name='tests.plugins.unlabelled', num_examples=5),
    evals={},
    **{'train.num_examples': 5},
  )
  summary = check_data.run(config, str(tmp_path))
  assert summary['splits']['train']['classes'] == {UNLABELLED: 5}
  assert summary['duplicates'] == 0
