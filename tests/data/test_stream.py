"""Tests of streams: batches, errors, memory bounds and the end of threads."""

import collections
import json
import threading
import time

import jax
import numpy as np
import pytest
from indexed_source import AUGMENT, PLAIN, Numbered, assert_same, mesh_of, train

from vit_jax.arrays import sharding
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.loader import BadRecord
from vit_jax.data.pipeline.stream import BadRecordLimit
from vit_jax.data.pipeline.workers import Reader
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def no_thread_is_left():
  before = set(threading.enumerate())
  yield
  deadline = time.monotonic() + 5
  while set(threading.enumerate()) - before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not set(threading.enumerate()) - before


# Training


@pytest.mark.parametrize('size, batch_size', [(24, 8), (20, 8), (7, 16)])
def test_every_example_once_per_epoch(size, batch_size):
  epochs = 2 * batch_size  # a whole number of batches
  steps = epochs * size // batch_size
  batches = train(Numbered(size), batch_size, steps, transform=PLAIN)
  labels = np.concatenate([batch['label'] for batch in batches])
  for epoch in labels.reshape(epochs, size):
    np.testing.assert_array_equal(np.sort(epoch), np.arange(size))


@pytest.mark.parametrize(
  'sizes',
  [
    dict(),
    dict(data=2),
    dict(data=4, fsdp=2),
    dict(fsdp=8),
    dict(data=2, fsdp=2, model=2),
    dict(model=8),
  ],
)
def test_batches_do_not_depend_on_the_mesh(sizes):
  """Nor do random crops; rows are split over data and fsdp."""
  mesh = mesh_of(**sizes)
  expected = train(Numbered(20), 16, 3)
  assert_same(train(Numbered(20), 16, 3, mesh=mesh), expected)
  with stream.train_batches(Numbered(20), AUGMENT, 16, 0, 0, mesh) as batches:
    batch = next(batches)
  assert batch['image'].shape == (16, 4, 4, 3)
  assert (batch['image'].dtype, batch['label'].dtype) == (np.uint8, np.int32)
  for array in batch.values():
    assert array.sharding == sharding.batch_sharding(mesh)


@pytest.mark.parametrize('start', [1, 3, 7])
def test_a_stream_can_start_at_any_step(start):
  whole = train(Numbered(20), 8, start + 3)
  assert_same(train(Numbered(20), 8, 3, start=start), whole[start:])


@pytest.mark.parametrize('threads, prefetch', [(1, 1), (3, 1), (5, 4)])
def test_batches_do_not_depend_on_threads(threads, prefetch):
  reader = Reader(threads=threads, prefetch=prefetch)
  expected = train(Numbered(50), 40, 4)
  assert_same(train(Numbered(50), 40, 4, reader=reader), expected)


def test_crops_differ_between_seeds_and_epochs():
  """Order and crops depend on the seed; crops differ between epochs."""
  labels = [train(Numbered(64), 64, 1, seed=seed)[0] for seed in (0, 1)]
  assert (labels[0]['label'] != labels[1]['label']).any()
  first, second = train(Numbered(8), 8, 2)
  rows = [list(second['label']).index(label) for label in first['label']]
  different = first['image'] != second['image'][rows]
  assert different.any(axis=(1, 2, 3)).sum() >= 7


def test_examples_do_not_depend_on_the_batch_size():
  """Position p has the same crop for any batch size."""

  def sequence(batch_size, steps):
    batches = train(Numbered(20), batch_size, steps)
    return {
      key: np.concatenate([batch[key] for batch in batches])
      for key in ('image', 'label')
    }

  assert_same([sequence(8, 6)], [sequence(24, 2)])


def test_the_skip_list_removes_batches():
  """Skipped batches are left out; other batches do not change."""
  whole = train(Numbered(20), 8, 9)
  skipped = train(Numbered(20), 8, 5, skipped=(1, 4))
  assert_same(skipped, [whole[i] for i in (0, 2, 3, 5, 6)])
  later = train(Numbered(20), 8, 3, start=2, skipped=(1, 4))
  assert_same(later, [whole[i] for i in (3, 5, 6)])


@pytest.mark.parametrize('make', [stream.train_batches, stream.eval_batches])
def test_a_batch_must_be_divisible(make):
  extra = (0, 0) if make is stream.train_batches else ()
  with pytest.raises(UserError, match='multiple of 8'):
    make(Numbered(20), PLAIN, 12, *extra, mesh_of(data=2, fsdp=4))


# Evaluation


@pytest.mark.parametrize('size', [1, 15, 16, 17, 40])
@pytest.mark.parametrize('batch_size', [8, 16, 24])
def test_eval_counts_every_example_once(size, batch_size):
  """`mask` is True once per example, in order, for any batch size."""
  with stream.eval_batches(
    Numbered(size), PLAIN, batch_size, mesh_of(data=4, fsdp=2)
  ) as stream_:
    batches = [jax.device_get(batch) for batch in stream_]
  assert len(batches) == -(-size // batch_size)
  assert all(len(batch['mask']) == batch_size for batch in batches)
  mask, label, image = (
    np.concatenate([batch[key] for batch in batches])
    for key in ('mask', 'label', 'image')
  )
  np.testing.assert_array_equal(label[mask], np.arange(size))
  np.testing.assert_array_equal(mask, np.arange(len(mask)) < size)
  assert not label[~mask].any() and not image[~mask].any()


def test_an_evaluation_reads_each_record_once():
  source = Numbered(21)
  with stream.eval_batches(source, PLAIN, 8, mesh_of()) as batches:
    assert len(list(batches)) == 3
  assert source.read == collections.Counter(range(21))


# Errors and prefetching


@pytest.mark.parametrize(
  'damage, words',
  [('bad_label', 'label 40; allowed: 0 to 39'), ('undecodable', '')],
)
def test_bad_records_are_named(damage, words):
  """The `next` of the batch raises, and the message names the record."""
  source = Numbered(40, **{damage: 17})
  with stream.eval_batches(source, PLAIN, 8, mesh_of()) as batches:
    for first in (0, 8):  # 17 is in the third batch
      batch = jax.device_get(next(batches))
      np.testing.assert_array_equal(batch['label'], first + np.arange(8))
    for _ in range(2):
      with pytest.raises(UserError, match=f'example 17 of numbered.*{words}'):
        next(batches)


def test_other_errors_of_a_source_are_raised_unchanged():
  source = Numbered(40, missing=3)
  with stream.eval_batches(source, PLAIN, 8, mesh_of()) as batches:
    with pytest.raises(OSError, match='disk is gone'):
      next(batches)


@pytest.mark.parametrize('taken', [0, 1, 5])
def test_close_ends_an_infinite_stream(taken):
  batches = stream.train_batches(Numbered(20), AUGMENT, 8, 0, 0, mesh_of())
  for _ in range(taken):
    next(batches)
  batches.close()
  assert not [t for t in threading.enumerate() if t.name.startswith('reader')]
  batches.close()  # a second call has no effect


def test_reading_ahead_is_bounded():
  """A stream that is not read prefetches a limited number of examples."""
  source = Numbered(1000)
  reader = Reader(threads=2, prefetch=2)
  with stream.train_batches(source, PLAIN, 8, 0, 0, mesh_of(), reader=reader):
    count = -1
    while count != (count := sum(source.read.values())):
      time.sleep(0.3)
  # Two on the devices, one in transfer, prefetch + 1 on the host.
  assert 8 <= count <= 8 * (2 + 1 + 3)


@pytest.fixture
def hosts(monkeypatch):
  """Returns a function that creates the limits of several processes."""

  def make(number, *arguments):
    limits = [BadRecordLimit(*arguments) for _ in range(number)]
    monkeypatch.setattr(
      stream.consensus,
      'gather_text',
      lambda text: [json.dumps(list(limit._own)) for limit in limits],
    )
    return limits

  return make


def read_bad(limits, indices):
  """Lets process i read the bad records `indices[i]` in one step."""
  for limit, own in zip(limits, indices, strict=True):
    noted = limit.reporting(None)
    for index in own:
      noted('data', BadRecord(index, '', 'broken'))
  for limit in limits:
    limit.add(sum(map(len, indices)))


@pytest.mark.parametrize('number', [1, 4])
def test_bad_records_are_counted_over_all_processes(hosts, number):
  """All processes reach the limit at the same step, whatever their number."""
  limits = hosts(number, 0.05, 1000, 'pets')
  for step in range(12):
    records = range(4 * step, 4 * step + 4)
    read_bad(limits, [records[i::number] for i in range(number)])
  for limit in limits:
    limit._own |= {100, 101, 102}
    with pytest.raises(UserError, match='51 of the 1000 records of pets'):
      limit.add(3)


def test_a_bad_record_counts_once(hosts):
  """It does not matter how often it is read, nor by which process."""
  limits = hosts(2, 0.02, 100)
  for _ in range(200):
    read_bad(limits, [[7, 8], [8]])
  with pytest.raises(UserError, match='3 of the 100 records'):
    read_bad(limits, [[7], [9]])


def test_one_bad_record_is_always_allowed(hosts):
  """One record may be more than the allowed fraction of a small dataset."""
  limits = hosts(1, 0.001, 100)
  read_bad(limits, [[5, 5, 5]])
  with pytest.raises(UserError, match='2 of the 100 records'):
    read_bad(limits, [[6]])
