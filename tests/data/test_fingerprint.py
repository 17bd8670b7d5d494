"""Tests that fingerprints are equal if and only if the data is equal."""

import shutil

import contract
import indexed_source
import pytest

from vit_jax.data import fingerprint
from vit_jax.data.sources import folder, manifest, mixture, synthetic, tfds


@pytest.fixture
def photos(tmp_path):
  """Creates a folder with two classes of three images."""
  for number in range(6):
    path = tmp_path / 'photos' / 'ab'[number // 3] / f'{number}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contract.png(number))
  return tmp_path / 'photos'


def of_folder(path, split='train'):
  return folder.Source(split, path=str(path)).fingerprint


def test_fingerprint_of_a_folder_depends_on_its_content(photos, tmp_path):
  """Names, sizes, contents, classes and parts change it; paths do not."""
  before = of_folder(photos)
  moved = shutil.copytree(photos, tmp_path / 'elsewhere' / 'data')
  assert of_folder(moved) == before and before['size'] == 6
  assert of_folder(moved, 'train[:50%]') != of_folder(moved, 'train[50%:]')
  (moved / 'a' / '1.png').rename(moved / 'a' / '11.png')
  renamed = of_folder(moved)
  assert renamed['listing'] != before['listing']
  assert renamed['records'] == before['records']
  last = photos / 'b' / '5.png'
  content = last.read_bytes()
  last.write_bytes(content + b'more')
  assert of_folder(photos)['records'] != before['records']
  last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  changed = of_folder(photos)
  assert changed.pop('contents') != before['contents']
  assert changed.items() <= before.items()
  (photos / 'b').rename(photos / 'c')
  assert of_folder(photos)['class_names'] == ['a', 'c']


def test_sizes_of_files_that_are_not_sampled_are_compared(tmp_path):
  (tmp_path / 'a').mkdir()
  for number in range(100):
    (tmp_path / 'a' / f'{number:02}.png').write_bytes(contract.png(0))
  before = of_folder(tmp_path)
  (tmp_path / 'a' / '41.png').write_bytes(contract.png(0) + b'more')
  changed = of_folder(tmp_path)
  assert changed.pop('file_sizes') != before['file_sizes']
  assert changed.items() <= before.items()


def test_entries_of_older_versions_are_compared():
  """Entries that an older version did not write are left out, also nested."""
  saved = {'size': 2, 'members': [{'size': 1}, {'size': 1}]}
  current = {
    'size': 2,
    'members': [{'size': 1, 'contents': 'a'}, {'size': 3, 'contents': 'b'}],
    'contents': 'c',
  }
  found = fingerprint.comparable(current, saved)
  assert found == {'size': 2, 'members': [{'size': 1}, {'size': 3}]}


def test_fingerprint_of_a_manifest_depends_on_its_labels(tmp_path):
  """The class of one image in the middle changes it."""
  path = tmp_path / 'list.csv'
  found = []
  for label in (1, 0):
    rows = [f'{i}.png,{label if i == 41 else i % 2}' for i in range(100)]
    path.write_text('\n'.join(['image,label', *rows]))
    found.append(manifest.Source('train', path=str(path)).fingerprint)
  before, after = found
  assert after.pop('listing') != before.pop('listing')
  assert after == before


def test_both_formats_of_tfds_have_the_same_fingerprint(prepared):
  """Both formats contain the same examples in the same order."""
  first, second = (
    tfds.Source('train', dataset='twin', data_dir=str(path)).fingerprint
    for path in prepared.values()
  )
  assert first == second
  assert first['dataset'] == 'twin/1.0.0'


def test_fingerprint_of_a_mixture_depends_on_its_members():

  def of_mixture(size):
    members = {
      'a': dict(name='synthetic', num_examples=10, weight=1.0),
      'b': dict(name='synthetic', num_examples=20, height=size, weight=1.0),
    }
    return mixture.Source('train', members=members).fingerprint

  alone = synthetic.Source('train', num_examples=10)
  assert of_mixture(32)['members'][0] == alone.fingerprint
  assert of_mixture(32)['size'] == 30
  assert of_mixture(32) != of_mixture(31)


def test_fingerprint_of_a_plug_in_source():
  """It consists of size, classes and a few records."""
  source = indexed_source.Numbered(100)
  found = source.fingerprint
  assert found['size'] == 100 and found['class_names'] == source.class_names
  assert found['records'][0][1] == 0 and found['records'][-1][1] == 99
  assert source.read.total() <= 8
  assert found == indexed_source.Numbered(100).fingerprint
  assert found != indexed_source.Numbered(101).fingerprint
