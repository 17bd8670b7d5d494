"""Tests of leaving listed examples out, and of examples in two splits."""

import json
import pathlib

import contract
import numpy as np
import pytest
from etils import epath
from minimal_config import completed, with_outputs
from tfds_twin import open_twin

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
KINDS = ['folder', 'manifest', 'mixture']


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


def open_split(root, kind, split='train'):
  """Opens a split of a kind of source."""
  photos, listed = dict(path=f'{root}/photos'), dict(path=f'{root}/list.csv')
  if kind == 'folder':
    return folder.Source(split, **photos)
  if kind == 'manifest':
    return manifest.Source(split, **listed)
  if kind == 'tfds':
    return tfds.Source(split, dataset='digits', data_dir=f'{root}/tfds')
  if kind == 'matched':
    source = folder.Source(split, **photos)
    return filters.matched(source, ['b', 'a'], 'weights')
  members = {
    'one': dict(name='manifest', weight=1.0, **listed),
    'two': dict(name='folder', weight=3.0, **photos),
  }
  return mixture.Source(split, members=members)


def write(path, source, indices):
  lines = filters.list_entries(source, np.array(indices))
  path.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  return str(path)


@pytest.mark.parametrize('kind', KINDS)
def test_listed_examples_are_left_out_of_every_split(root, kind, tmp_path):
  """The others remain, in the same order, in every split of the data."""
  whole = open_split(root, kind)
  path = write(tmp_path / 'list.jsonl', whole, LISTED)
  listed = {whole.where(i) for i in LISTED}
  for split in ('train', 'train[:40%]', 'train[50%:]+train[:10%]'):
    source = open_split(root, kind, split)
    short = filters.without_listed(source, path)
    examples = [source[i] for i in range(len(source))]
    kept = [i for i in range(len(source)) if source.where(i) not in listed]
    assert len(kept) < len(source)
    expected = [(examples[i]['image'], examples[i]['label']) for i in kept]
    contract.check(short, expected, [source.where(i) for i in kept])
    before, after = (
      [(part, row) for part, rows in each.rows() for row in rows.tolist()]
      for each in (source, short)
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


def test_mixtures_without_listed_examples(root, tmp_path):
  """Members keep their weights, and are read in whole epochs."""
  whole = open_split(root, 'mixture')
  path = write(tmp_path / 'list.jsonl', whole, [1, 2, 40])
  short = filters.without_listed(whole, path)
  indices = short.locate(np.arange(4 * 28), 0)
  positions = whole.locate(np.arange(4 * 28), 0)
  np.testing.assert_array_equal(indices < 28, positions < 30)
  second = indices[indices >= 28]
  assert sorted(second[:29]) == [*range(28, 57)] and indices.max() < 57
  assert short.replacements(0) == range(28)
  assert short.replacements(30) == range(28, 57)
  # Members are identified by name, not by their number among the chosen.
  short = filters.without_listed(open_split(root, 'mixture', 'two/train'), path)
  assert len(short) == 29
  assert whole.where(40) not in {short.where(i) for i in range(29)}


def test_the_identity_of_the_data_depends_on_the_examples(root, tmp_path):
  """Another list of the same length is other data; a moved list is not."""
  source = open_split(root, 'folder')
  one, moved, other = (
    filters.without_listed(
      source, write(tmp_path / name, source, indices)
    ).fingerprint
    for name, indices in (('a', [2, 5]), ('b', [5, 2]), ('c', [2, 6]))
  )
  assert one == moved != other
  assert one['size'] == other['size'] == 28


def test_the_length_of_training_follows(root, tmp_path):
  """`num_examples` is compared with the number of remaining examples."""
  path = write(tmp_path / 'list.jsonl', open_split(root, 'folder'), LISTED)
  config = completed(
    source=dict(name='folder', path=f'{root}/photos'),
    num_classes=2,
    **{'train.leave_out': path, 'train.num_examples': 22},
  )
  assert len(data.open_train(with_outputs(config))) == 22
  config.train.num_examples = 30
  with pytest.raises(UserError, match='22.*num_examples.*30'):
    data.open_train(with_outputs(config))


def test_a_list_of_other_data_is_refused(root, tmp_path):
  """Checksums are compared up to the end of a long list."""
  source = open_split(root, 'folder')
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
  wrong = [{'position': x} for x in ('3', [3], 3.0)]
  wrong += [{'part': ['train']}, {'checksum': 5}]
  texts = [json.dumps(lines[0] | each) for each in wrong]
  for text in ('{"part": "train", "position": 3}', 'cat.jpg', '[]', *texts):
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
  class Ordered(folder.Source):
    def locate(self, positions, seed):
      return positions

  source, other = open_split(root, 'folder'), synthetic.Source('train')
  path = write(tmp_path / 'list.jsonl', source, LISTED)
  assert filters.without_listed(other, path, strict=False) is other
  ordered = Ordered('train', path=f'{root}/photos')
  for each, words in ((other, 'rows'), (ordered, 'Ordered.*without')):
    with pytest.raises(UserError, match=words):
      filters.without_listed(each, path)
  for each in (source, open_split(root, 'mixture')):  # all of a member
    with pytest.raises(UserError, match='all 30'):
      filters.without(each, np.arange(30))


@pytest.mark.parametrize('kind', [*KINDS, 'tfds', 'matched'])
def test_overlap_of_parts_of_a_split(root, kind):
  """The count is 0 for disjoint parts and exact for overlapping parts."""
  whole, first, middle, last = (
    open_split(root, kind, f'train[{part}]')
    for part in ('0%:', ':50%', '25%:75%', '50%:')
  )
  shared = inspection.num_common
  assert shared(first, last) == 0
  assert shared(whole, last) == len(last) > 0
  assert shared(whole, whole) == len(whole)
  assert shared(first, middle) + shared(middle, last) == len(middle)


def test_listed_images_are_left_out_of_pseudo_labels(tmp_path):
  """All copies of the images are, and no others."""
  photos = dict(path=str(tmp_path / 'photos'))
  (tmp_path / 'photos').mkdir()
  for i in range(8):
    (tmp_path / f'photos/{i}.png').write_bytes(contract.png(i))
  images = folder.Source('train', **photos)
  texts = ('checkpoint', 'weights', 'digest', 'data', 'on_bad_record')
  computation = parts.Computation(
    **dict.fromkeys(texts, ''),
    source=dict(name='folder', **photos),
    split='train',
    fingerprint=images.fingerprint,
    class_names=['a', 'b'],
    examples=8,
    preprocess={},
    batch_size=8,
    part_examples=8,
    settings={},
  )
  labels = parts.Parts.begin(epath.Path(tmp_path / 'labels'), computation)
  soft = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]]
  labels.write(0, {'soft': soft, 'index': np.array([1, 3, 4, 7])})
  copies = {'copies': np.array([2, 1, 3, 1])}
  parts.save(labels.folder / pseudo_labels.SELECTION, copies)
  listed = write(tmp_path / 'list.jsonl', images, [3, 4, 5])
  source = pseudo_labels.Source('train', path=str(labels.folder))
  kept = filters.without_listed(source, listed)
  expected = [images.where(i) for i in (1, 1, 7)]
  assert [kept.where(i) for i in range(len(kept))] == expected


@pytest.mark.parametrize('kind', ['array_record', 'tfrecord'])
def test_a_list_applies_to_moved_data_without_damaged_shards(
  prepared, copied, tmp_path, kind
):
  source = open_twin(prepared[kind])
  path = write(tmp_path / 'list.jsonl', source, [0, 30])
  folder, shard = copied(kind)
  shard.write_bytes(b'' if kind == 'array_record' else shard.read_bytes()[:-1])
  moved = open_twin(folder, on_bad_shard='skip')
  left = filters.without_listed(moved, path)
  assert len(moved) == (26 if kind == 'array_record' else 39)
  found = [left[i]['image'] for i in range(len(left))]
  expected = [moved[i]['image'] for i in range(1, len(moved))]
  expected.remove(source[30]['image'])
  assert found == expected
