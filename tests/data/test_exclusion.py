"""Tests of leaving listed examples out, and of examples in two splits."""

import json
import pathlib

import contract
import numpy as np
import pytest
from etils import epath
from minimal_config import completed, with_outputs

from vit_jax.data import filters, inspection
from vit_jax.data.contract import Remaining
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import (
  folder,
  manifest,
  mixture,
  pseudo_labels,
  synthetic,
  tfds,
)
from vit_jax.data.storage import parts
from vit_jax.errors import UserError
from vit_jax.training import data

LISTED = [0, 3, 4, 9, 12, 17, 21, 29]


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """Creates thirty images of two classes as a folder and as a manifest."""
  root = tmp_path_factory.mktemp('images')
  lines = ['image,label']
  for i in range(30):
    path = root / 'photos' / 'ab'[i % 2] / f'{i:02d}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contract.png(i))
    # Parts of a split depend on the names in the list, so these are relative.
    lines.append(f'{path.relative_to(root)},{"ab"[i % 2]}')
  (root / 'list.csv').write_text('\n'.join(lines))
  return root


def sources(root):
  """Returns functions that open a split of each kind of source."""
  photos = dict(path=f'{root}/photos')
  listed = dict(path=f'{root}/list.csv')
  members = {
    'one': dict(name='manifest', weight=1.0, **listed),
    'two': dict(name='folder', weight=3.0, **photos),
  }
  return {
    'folder': lambda split: folder.Source(split, **photos),
    'manifest': lambda split: manifest.Source(split, **listed),
    'mixture': lambda split: mixture.Source(split, members=members),
  }


def write(path, source, indices):
  lines = filters.list_entries(source, np.array(indices))
  path.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  return str(path)


@pytest.mark.parametrize('name', sources('').keys())
def test_listed_examples_are_left_out_of_every_split(root, name, tmp_path):
  """The others remain, in the same order, in every split of the data."""
  open_split = sources(root)[name]
  whole = open_split('train')
  path = write(tmp_path / 'list.jsonl', whole, LISTED)
  listed = {whole.where(i) for i in LISTED}
  for split in ('train', 'train[:40%]', 'train[50%:]+train[:10%]'):
    source = open_split(split)
    short = filters.without_listed(source, path)
    examples = [source[i] for i in range(len(source))]
    kept = [i for i in range(len(source)) if source.where(i) not in listed]
    assert len(kept) < len(source)
    expected = [(examples[i]['image'], examples[i]['label']) for i in kept]
    contract.check(short, expected, [source.where(i) for i in kept])
    parts = filters.checked_rows(source), filters.checked_rows(short)
    before, after = (
      [(part, row) for part, rows in each for row in rows.tolist()]
      for each in parts
    )
    assert after == [before[i] for i in kept]


def test_rows_of_several_parts():
  """Indices count through all parts, and a part may occur twice."""
  parts = [('a', [4, 5, 6]), ('b', [0, 2]), ('a', [9, 1, 3, 8]), ('c', [7])]

  class Parts(synthetic.Source):
    def rows(self):
      return ((part, np.array(rows)) for part, rows in parts)

  source = Parts('train', num_examples=10)
  short = Remaining(source, np.array([1, 3, 4, 6, 8]))
  found = [(part, rows.tolist()) for part, rows in short.rows()]
  assert found == [('a', [4, 6]), ('b', []), ('a', [9, 3]), ('c', [7])]


def test_an_example_is_in_a_mixture_as_often_as_before(root, tmp_path):
  """Members keep their weights, and are read in whole epochs."""
  source = sources(root)['mixture']('train')
  path = write(tmp_path / 'list.jsonl', source, [1, 2, 40])
  short = filters.without_listed(source, path)
  indices = short.locate(np.arange(4 * 28), 0)
  first = indices < 28
  assert np.bincount(indices, minlength=57).shape == (57,)
  whole = source.locate(np.arange(4 * 28), 0)
  np.testing.assert_array_equal(first, whole < 30)
  second = indices[~first]
  assert sorted(second[:29]) == [*range(28, 57)]
  assert short.replacements(0) == range(28)
  assert short.replacements(30) == range(28, 57)


def test_a_list_of_a_mixture_applies_to_some_of_its_members(root, tmp_path):
  """Members are identified by name, not by their number among the chosen."""
  open_split = sources(root)['mixture']
  whole = open_split('train')
  path = write(tmp_path / 'list.jsonl', whole, [1, 2, 40])
  short = filters.without_listed(open_split('two/train'), path)
  assert len(short) == 29
  assert whole.where(40) not in {short.where(i) for i in range(29)}


def test_the_identity_of_the_data_depends_on_the_examples(root, tmp_path):
  """Another list of the same length is other data; a moved list is not."""
  source = sources(root)['folder']('train')
  one, moved, other = (
    filters.without_listed(
      source, write(tmp_path / name, source, indices)
    ).fingerprint
    for name, indices in (('a', [2, 5]), ('b', [5, 2]), ('c', [2, 6]))
  )
  assert one == moved != other
  assert one['size'] == other['size'] == 28


def test_the_order_and_the_length_of_training_follow(root, tmp_path):
  """`num_examples` is compared with the number of remaining examples."""
  source = sources(root)['folder']('train')
  path = write(tmp_path / 'list.jsonl', source, LISTED)
  changes = {
    'source': dict(name='folder', path=f'{root}/photos'),
    'num_classes': 2,
    'train.leave_out': path,
  }
  train = data.open_train(
    with_outputs(completed(**changes, **{'train.num_examples': 22}))
  )
  assert len(train) == 22
  with pytest.raises(UserError, match='22.*num_examples.*30'):
    data.open_train(
      with_outputs(completed(**changes, **{'train.num_examples': 30}))
    )


def test_a_list_of_other_data_is_refused(root, tmp_path):
  """Checksums are compared up to the end of a long list."""
  source = sources(root)['folder']('train')
  path = write(tmp_path / 'list.jsonl', source, range(25))
  assert len(filters.without_listed(source, path)) == 5
  lines = [json.loads(x) for x in pathlib.Path(path).read_text().splitlines()]
  changed = [*lines[:-1], lines[-1] | {'checksum': '00'}]
  elsewhere = [line | {'part': 'web'} for line in lines]
  other = tmp_path / 'other.jsonl'
  for entries, mentioned in ((changed, source.where(24)), (elsewhere, 'web')):
    other.write_text('\n'.join(map(json.dumps, entries)))
    with pytest.raises(UserError, match=mentioned):
      filters.without_listed(source, str(other))
    # It is ignored where other data are allowed.
    assert filters.without_listed(source, str(other), strict=False) is source
  for text in (
    '{"part": "train", "position": 3}',
    'cat.jpg',
    '[]',
    *(json.dumps(lines[0] | {'position': x}) for x in ('3', [3], 3.0)),
    json.dumps(lines[0] | {'part': ['train']}),
    json.dumps(lines[0] | {'checksum': 5}),
  ):
    other.write_text(text)
    with pytest.raises(UserError, match='other.jsonl.*checksum'):
      filters.without_listed(source, str(other))
  with pytest.raises(UserError, match='lost.jsonl'):
    filters.without_listed(source, str(tmp_path / 'lost.jsonl'))


def test_a_bad_record_is_listed_without_a_checksum(tmp_path):
  class Damaged(synthetic.Source):
    def rows(self):
      yield 'train', np.arange(len(self))

    def __getitem__(self, index):
      if index == 3:
        raise DecodeError('damaged')
      return super().__getitem__(index)

  source = Damaged('train', num_examples=6)
  lines = filters.list_entries(source, np.array([2, 3]))
  assert lines[1]['checksum'] is None and lines[0]['checksum']
  path = write(tmp_path / 'list.jsonl', source, [3])
  assert len(filters.without_listed(source, path)) == 5


def test_sources_that_cannot_leave_examples_out_are_refused(root, tmp_path):
  source = sources(root)['folder']('train')
  path = write(tmp_path / 'list.jsonl', source, LISTED)
  with pytest.raises(UserError, match='rows'):
    filters.without_listed(synthetic.Source('train'), path)
  other = synthetic.Source('train')
  assert filters.without_listed(other, path, strict=False) is other
  with pytest.raises(UserError, match='all 30'):
    filters.without(source, np.arange(30))

  class Ordered(folder.Source):
    def locate(self, positions, seed):
      return positions

  with pytest.raises(UserError, match='Ordered.*without'):
    filters.without_listed(Ordered('train', path=f'{root}/photos'), path)
  with pytest.raises(UserError, match='all 30'):  # of a member
    filters.without(sources(root)['mixture']('train'), np.arange(30))


@pytest.mark.parametrize('name', [*sources(''), 'tfds', 'matched'])
def test_overlap_of_parts_of_a_split(root, name):
  """The count is 0 for disjoint parts and exact for overlapping parts."""
  digits = dict(dataset='digits', data_dir=f'{root}/tfds')
  more = {
    'tfds': lambda split: tfds.Source(split, **digits),
    'matched': lambda split: filters.matched(
      folder.Source(split, path=f'{root}/photos'), ['b', 'a'], 'weights'
    ),
  }
  open_split = (sources(root) | more)[name]
  whole, first, last = map(open_split, ('train', 'train[:50%]', 'train[50%:]'))
  assert inspection.count(first, last) == 0
  assert inspection.count(whole, last) == len(last) > 0
  assert inspection.count(whole, whole) == len(whole)
  middle = open_split('train[25%:75%]')
  shared = inspection.count(first, middle) + inspection.count(middle, last)
  assert shared == len(middle)


def test_listed_images_are_left_out_of_pseudo_labels(tmp_path):
  """All copies of the images are, and no others."""
  photos = dict(path=str(tmp_path / 'photos'))
  (tmp_path / 'photos').mkdir()
  for i in range(8):
    (tmp_path / f'photos/{i}.png').write_bytes(contract.png(i))
  images = folder.Source('train', **photos)
  index, copies = np.array([1, 3, 4, 7]), np.array([2, 1, 3, 1])
  computation = parts.Computation(
    checkpoint='w.npz',
    weights='params',
    digest='x',
    data='photos',
    source=dict(name='folder', **photos),
    split='train',
    fingerprint=images.fingerprint,
    class_names=['a', 'b'],
    examples=8,
    on_bad_record='error',
    preprocess={},
    batch_size=8,
    part_examples=8,
    settings={},
  )
  labels = parts.Parts.begin(epath.Path(tmp_path / 'labels'), computation)
  soft = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]]
  labels.write(0, {'soft': soft, 'index': index})
  parts.save(labels.folder / pseudo_labels.SELECTION, {'copies': copies})
  path = str(labels.folder)
  listed = tmp_path / 'list.jsonl'
  entries = filters.list_entries(images, np.array([3, 4, 5]))
  listed.write_text('\n'.join(map(json.dumps, entries)))
  source = pseudo_labels.Source('train', path=path)
  kept = filters.without_listed(source, str(listed))
  expected = [images.where(i) for i in (1, 1, 7)]
  assert [kept.where(i) for i in range(len(kept))] == expected
