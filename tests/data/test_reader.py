"""Tests of prefetching: order of errors, memory bounds, end of threads."""

import json
import threading
import time

import jax
import numpy as np
import pytest
from indexed_source import AUGMENT, PLAIN, Numbered, mesh_of

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
