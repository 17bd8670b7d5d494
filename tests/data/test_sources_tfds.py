"""Tests of TFDS datasets in tfrecord against array_record, and of `digits`."""

import io
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import contract
import numpy as np
import pytest
import tensorflow_datasets as tfds_lib
from PIL import Image
from tfds_twin import open_twin

from vit_jax.data.sources import digits, tfds
from vit_jax.errors import UserError

FORMATS = ('tfrecord', 'array_record')  # keys of the fixture `prepared`


@pytest.fixture
def damaged(copied):
  """Returns a copy of the tfrecord dataset: (folder, a shard)."""
  return copied('tfrecord')


@pytest.mark.parametrize('kind', FORMATS)
def test_examples_with_several_labels(prepared, kind):
  """A list next to the label, possibly empty."""
  plain = open_twin(prepared[kind], 'train[8:]')
  source = open_twin(prepared[kind], 'train[8:]', others=('several',))
  source = pickle.loads(pickle.dumps(source))
  found = [source[i] for i in range(len(source))]
  lists = [each.pop('several') for each in found]
  assert found == [plain[i] for i in range(32)]
  assert {*map(tuple, lists)} == {(), (0,), (0, 1), (0, 1, 2)}
  assert source.label_keys == ('label', 'several')


def test_a_list_of_classes_renames_and_reorders_them(prepared, tmp_path):
  """Every key with the same classes has the new labels."""
  plain = open_twin(prepared['tfrecord'], others=('several',))
  listed = tmp_path / 'names.txt'
  listed.write_text('unknown\ndog\tthe dog\ncow\ncat\n')
  settings = dict(class_map=str(listed), others=('several',))
  source = open_twin(prepared['tfrecord'], **settings)
  assert source.class_names == ['unknown', 'the dog', 'cow', 'cat']
  for i in range(len(source)):
    old, new = plain[i], source[i]
    assert new['label'] == 3 - old['label'] and new['image'] == old['image']
    assert new['several'] == [3 - each for each in old['several']]
  assert source.fingerprint['new_labels'] == [3, 2, 1]
  assert plain.fingerprint['new_labels'] is None
  listed.write_text('cow\ndog')
  with pytest.raises(UserError, match="twin has the class 'cat'"):
    open_twin(prepared['tfrecord'], **settings)


@pytest.mark.parametrize('split', ['train[10:35]+test', 'all', 'train[1shard]'])
@pytest.mark.parametrize('kind', FORMATS)
def test_examples_equal_those_of_tfds(prepared, kind, split):
  """The contract of sources is checked with TFDS's own reader."""
  builder = tfds_lib.builder_from_directory(prepared[kind] / 'twin' / '1.0.0')
  plain = dict(decoders={'image': tfds_lib.decode.SkipDecoding()})
  if kind == 'array_record':
    examples = builder.as_data_source(split, **plain)
  else:
    in_order = tfds_lib.ReadConfig(interleave_cycle_length=1)
    examples = builder.as_dataset(
      split=split, read_config=in_order, **plain
    ).as_numpy_iterator()
  expected = [(each['image'], int(each['label'])) for each in examples]
  source = open_twin(prepared[kind], split)
  contract.check(source, expected, [f'.{kind}-0000'])
  assert source.class_names == ['cat', 'cow', 'dog']


def test_reading_does_not_import_tensorflow(prepared):
  """In either format."""
  code = f"""
import importlib.machinery as machinery, sys
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = staticmethod(
  lambda name, *a: None if name == 'tensorflow' else find(name, *a)
)
from vit_jax.data.sources.tfds import Source
for folder in {[str(folder) for folder in prepared.values()]}:
  print(Source('train[3:]', dataset='twin', data_dir=folder)[5]['label'])
assert 'tensorflow' not in sys.modules
"""
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=root, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  expected = open_twin(prepared['tfrecord'], 'train[3:]')[5]['label']
  assert done.stdout.split()[-2:] == [str(expected)] * 2


def test_a_truncated_shard(damaged):
  """It is an error that names it, or its complete records are used."""
  folder, shard = damaged
  whole = open_twin(folder)
  images = [whole[i]['image'] for i in range(40)]
  offset = int(whole.where(20).partition(' @ ')[2])
  os.truncate(shard, offset + 5)
  with pytest.raises(UserError, match=f'{shard} .* offset {offset - 12} of'):
    open_twin(folder)
  for split, expected in (
    ('train', images[:20] + images[27:]),
    ('train[18:29]', images[18:20] + images[27:29]),
  ):
    left = open_twin(folder, split, on_bad_shard='skip')
    assert [left[i]['image'] for i in range(len(left))] == expected
  assert len(open_twin(folder, 'test')) == 7  # its shards are complete


def test_shards_with_other_counts_are_refused(damaged):
  """TFDS stores the number of records per shard."""
  folder, shard = damaged
  shutil.copy(str(shard).replace('00001-of', '00000-of'), shard)
  with pytest.raises(UserError, match='13 records.*dataset_info.json.* 14'):
    open_twin(folder)
  shard.unlink()
  with pytest.raises(UserError, match=f'No such file.*{shard}'):
    open_twin(folder)


@pytest.mark.parametrize('name', ['dataset_info.json', 'features.json'])
@pytest.mark.parametrize('share', [0, 0.5])
def test_damaged_descriptions_are_refused(damaged, name, share):
  """The message names the folder, and what to do."""
  folder, shard = damaged
  path = shard.parent / name
  os.truncate(path, int(path.stat().st_size * share))
  with pytest.raises(UserError, match=r'1\.0\.0 cannot be read .*copy the'):
    open_twin(folder)


def test_datasets_of_old_tfds_are_read(damaged):
  """Old versions did not store the file format."""
  folder, shard = damaged
  about = shard.parent / 'dataset_info.json'
  info = json.loads(about.read_text())
  del info['fileFormat']
  about.write_text(json.dumps(info))
  assert len(open_twin(folder)) == 40


@pytest.mark.parametrize(
  'settings, words',
  [
    (dict(split='vaild'), "no split 'vaild'.* test, train"),
    (dict(split='train[:41]'), r'train \(40 examples\)'),
    (dict(split='train[5:5]'), 'without examples'),
    (dict(image_key='file_name'), "'file_name'.*file_name: Text.*: image;"),
    (dict(label_key='number'), "'number'.*: coarse, even, label, None"),
    (dict(others=('other',)), "'other'"),
    (dict(others=('label/x',)), "'label/x'"),
    (dict(label_key='coarse', others=('label',)), "'label'.*'coarse'"),
    (dict(on_bad_shard='x'), 'error, skip'),
    (dict(dataset='twim'), "did you mean 'twin'. allowed: twin.*prepare twim"),
  ],
)
def test_messages_of_wrong_settings(prepared, settings, words):
  with pytest.raises(UserError, match=words):
    open_twin(prepared['tfrecord'], **settings)


def test_a_group_of_features_is_no_value():
  kinds = tfds_lib.features
  parts = kinds.Sequence({'text': kinds.Text()})
  features = kinds.FeaturesDict({'captions': parts})
  with pytest.raises(UserError, match="'captions'.* are captions/text:"):
    tfds._leaf(features, 'captions', 'coco')
  assert not tfds._leaf(features, 'captions/text', 'coco')[1]


# Digits


@pytest.fixture
def user_directory(tmp_path, monkeypatch):
  """Sets $TFDS_DATA_DIR to an empty directory next to the cache."""
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  (tmp_path / 'tfds').mkdir()
  return tmp_path / 'tfds'


def test_the_users_directory_is_not_written_to(user_directory, capfd):
  """Digits are written to the cache, without progress bars in the log."""
  assert len(tfds.Source('train', dataset='digits')) == digits.NUM_TRAIN
  assert not list(user_directory.iterdir())
  cache = user_directory.parent / 'cache/vit_jax/tfds/digits/1.0.0'
  assert (cache / 'dataset_info.json').exists()
  printed = capfd.readouterr()
  assert '%|' not in printed.out + printed.err


def test_digits_in_the_users_directory_are_used(user_directory):
  """Digits written there by an earlier version are still used."""
  for data_dir in (str(user_directory), None):
    source = tfds.Source('test', dataset='digits', data_dir=data_dir)
    assert len(source) == digits.NUM_TEST
  assert not (user_directory.parent / 'cache').exists()


def test_digits_have_the_bytes_that_tensorflow_writes(user_directory):
  """A run resumes whether or not TensorFlow prepared its digits."""
  tf = pytest.importorskip('tensorflow')
  source = tfds.Source('test', dataset='digits', data_dir=str(user_directory))
  for row in range(len(source)):
    data = source[row]['image']
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    assert pixels.shape == (8, 8, 3)
    assert data == tf.io.encode_png(pixels).numpy()
