"""Tests of class-balanced sampling."""

import pickle

import numpy as np
import pytest
from indexed_source import PLAIN, mesh_of, train

from vit_jax.data import balanced
from vit_jax.data.contract import Remaining, Source
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import stream
from vit_jax.data.sources import manifest, mixture
from vit_jax.errors import UserError


class Unbalanced(Source):
  """A source without the method `labels`, with two bad records.

  Class 1 has no examples.
  """

  name, num_classes, class_names = 'unbalanced', 4, list('abcd')

  def __init__(self):
    self._labels = np.repeat([0, 2, 3, 9], [30, 5, 1, 1])

  def __len__(self):
    return 38

  def __getitem__(self, index):
    if index == 37:
      raise DecodeError('damaged')
    image = np.full((4, 4, 3), index, np.uint8)
    return {'image': image, 'label': int(self._labels[index])}


def streamed(source, start, steps, **options):
  """Returns the batches of a stream from a step on."""
  settings = dict(transform=PLAIN, seed=5, mesh=mesh_of())
  return train(source, 6, steps, start=start, **settings, **options)


def test_classes_occur_equally_often():
  """All examples are used, bad labels never, and resuming is exact."""
  source = balanced.Balanced(Unbalanced())
  batches = streamed(source, 0, 30)
  labels = np.concatenate([batch['label'] for batch in batches])
  assert np.bincount(labels).tolist() == [60, 0, 60, 60]
  images = np.concatenate([batch['image'][:, 0, 0, 0] for batch in batches])
  seen, times = np.unique(images, return_counts=True)
  assert seen.tolist() == list(range(36))
  assert times.tolist() == [2] * 30 + [12] * 5 + [60]
  for late, whole in zip(streamed(source, 7, 2), batches[7:], strict=False):
    np.testing.assert_array_equal(late['image'], whole['image'])
  copy = pickle.loads(pickle.dumps(source))
  orders = [each.locate(np.arange(50), 1) for each in (source, copy)]
  np.testing.assert_array_equal(*orders)


def test_bad_records_are_replaced_within_their_class():
  """An undecodable image does not change the classes of a batch."""

  class Damaged(Unbalanced):
    def labels(self):
      return self._labels

    def __getitem__(self, index):
      if index in (3, 31, 32):
        raise DecodeError('damaged')
      return super().__getitem__(index)

  reader = stream.Reader(on_bad_record='skip', max_bad_share=1)
  batches = streamed(balanced.Balanced(Damaged()), 0, 10, reader=reader)
  labels = np.concatenate([batch['label'] for batch in batches])
  assert np.bincount(labels).tolist() == [20, 0, 20, 20]
  assert sum(batch['replaced'].sum() for batch in batches) > 5


def test_listed_labels_are_used(tmp_path):
  """The labels of a manifest are known without reading its images."""
  rows = [f'{i}.png,{"cat" if i else "dog"}' for i in range(9)]
  (tmp_path / 'pets.csv').write_text('\n'.join(['image,label', *rows]))
  path = str(tmp_path / 'pets.csv')
  listed = manifest.Source('train[2:]+train[:2]', path=path)
  source = balanced.Balanced(listed)
  assert len(source) == 9 and source.where(0)
  [dog] = np.flatnonzero(listed.labels() == source.class_names.index('dog'))
  turns = source.locate(np.arange(20), 0).reshape(10, 2)
  assert (np.sort(turns == dog) == [False, True]).all()


def test_data_that_cannot_be_balanced():
  """Mixtures have their own order, and some data have no labels."""
  member = dict(name='synthetic', num_examples=3, weight=1)
  unlabelled, invalid = Unbalanced(), Unbalanced()
  unlabelled.num_classes = 0
  invalid._labels = invalid._labels + 9
  mixed = mixture.Source('train', members=dict(a=member))
  for source in (mixed, unlabelled, invalid):
    with pytest.raises(UserError, match=r'train\.balanced.*no valid labels'):
      balanced.Balanced(source)


def test_labels_of_remaining_examples():
  """They are listed without reading the examples, if the source lists them."""
  left_out = np.array([1, 36])
  source = Remaining(Unbalanced(), left_out)
  read = balanced.labels(source)
  listing = Unbalanced()
  listing.labels = lambda: np.append(listing._labels, -1)
  listed = Remaining(listing, left_out).labels()
  np.testing.assert_array_equal(np.where(listed < 4, listed, -1), read)
  assert len(read) == 36
