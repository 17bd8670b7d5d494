"""Reading ahead: errors in their place, and no thread that outlives it."""

import threading
import time

import jax
import numpy as np
import pytest
from numbered import AUGMENT, PLAIN, Numbered, assert_same, mesh_of, train

from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.bad_record_limit import BadShare
from vit_jax.data.pipeline.reader import Reader
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def no_thread_is_left():
  """After each test, whatever happened in it, all its threads are gone."""
  before = set(threading.enumerate())
  yield
  deadline = time.monotonic() + 5
  while set(threading.enumerate()) - before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(
  'damage, words',
  [
    (
      dict(bad_label=17),
      ['example 17 of numbered/train', 'label 40', '0 to 39'],
    ),
    (dict(undecodable=17), ['example 17 of numbered/train', 'cannot be used']),
  ],
)
def test_bad_records_are_named(damage, words):
  """The `next` of that batch raises, not an earlier one, and says which."""
  source = Numbered(40, **damage)
  batches = stream.eval_batches(source, PLAIN, 8, mesh_of())
  with batches:
    for first in (0, 8):  # 17 is in the third batch
      batch = jax.device_get(next(batches))
      np.testing.assert_array_equal(batch['label'], first + np.arange(8))
    for _ in range(2):
      with pytest.raises(UserError) as error:
        next(batches)
      for word in words:
        assert word in str(error.value)


def test_bad_records_in_training():
  """Training goes on until the batch that holds the bad record."""
  good = train(Numbered(40), 8, 5, transform=PLAIN)
  [step] = [s for s, batch in enumerate(good) if 17 in batch['label']]
  with stream.train_batches(
    Numbered(40, undecodable=17), PLAIN, 8, 0, 0, mesh_of()
  ) as batches:
    assert_same(
      [jax.device_get(next(batches)) for _ in range(step)], good[:step]
    )
    with pytest.raises(UserError, match='example 17'):
      next(batches)


def test_other_errors_come_through():
  """What a source raises is raised by `next`, as it is."""
  source = Numbered(40, missing=3)
  with stream.eval_batches(source, PLAIN, 8, mesh_of()) as batches:
    with pytest.raises(OSError, match='disk is gone'):
      next(batches)


@pytest.mark.parametrize('taken', [0, 1, 5])
def test_closing_in_the_middle(taken):
  """An endless stream ends at once, however much of it was taken."""
  batches = stream.train_batches(Numbered(20), AUGMENT, 8, 0, 0, mesh_of())
  for _ in range(taken):
    next(batches)
  batches.close()
  assert not batches._thread.is_alive()
  assert not [t for t in threading.enumerate() if t.name.startswith('reader')]
  batches.close()  # twice does no harm


def test_an_exception_closes():
  """Leaving the block by an exception stops the threads, too."""
  with pytest.raises(KeyError):
    with stream.train_batches(Numbered(20), AUGMENT, 8, 0, 0, mesh_of()):
      raise KeyError


def test_reading_ahead_is_bounded():
  """A stream that nobody reads does not load the data set."""
  source = Numbered(1000)
  reader = Reader(threads=2, prefetch=2)
  with stream.train_batches(source, PLAIN, 8, 0, 0, mesh_of(), reader=reader):
    count = -1
    while count != (count := sum(source.read.values())):
      time.sleep(0.3)
  # Two on the devices, one waiting to get there, prefetch + 1 on the host.
  assert 8 <= count <= 8 * (2 + 1 + 3)


def counts(bad, rows, hosts):
  """What the step sums over hosts with every `bad`-th of their rows bad."""
  return sum(sum(i % bad == 0 for i in range(rows)) for _ in range(hosts))


@pytest.mark.parametrize('hosts', [1, 4])
def test_the_bad_share_is_of_all_processes(hosts):
  """However many share the rows, the run ends at the same number."""
  share, met = BadShare(0.05, 1000), 0
  rows = 40 // hosts
  with pytest.raises(UserError, match='max_bad_share=0.05 allows') as error:
    for _ in range(100):
      bad = counts(10, rows, hosts)
      met += bad
      share.add(bad, 40)
  assert 50 < met <= 50 + 8 and f'{met} times' in str(error.value)


def test_the_bad_share_of_many_epochs():
  """A record that is bad is met in each; that makes no more of them."""
  share = BadShare(0.1, 100)
  for _ in range(200):
    share.add(5, 50)
  with pytest.raises(UserError):
    for _ in range(200):
      share.add(10, 50)
  one = BadShare(0.001, 100)  # less than one record: one is let pass
  for epoch in range(20):
    one.add(epoch % 2, 50)
    one.add(1 - epoch % 2, 50)
  with pytest.raises(UserError):
    one.add(2, 50)
  BadShare(1.0, 10).add(1000, 10)


def test_a_bad_record_that_is_repeated():
  """All of its copies come at once, and are one record still."""
  share = BadShare(0.001, 100, repeats=3)
  for _ in range(10):
    share.add(3, 100)
    share.add(0, 200)
  with pytest.raises(UserError, match='4 times'):
    BadShare(0.001, 100, repeats=3).add(4, 100)


@pytest.mark.parametrize('share', [-0.1, 1.01, 40, float('nan')])
def test_impossible_shares(share):
  """A share is not a number of records, nor per cent."""
  with pytest.raises(
    UserError, match='max_bad_share is .*at least 0 and at most 1'
  ):
    Reader(max_bad_share=share)


@pytest.mark.parametrize('settings', [dict(threads=-1), dict(prefetch=0)])
def test_impossible_readers(settings):
  """Numbers that cannot be are refused when built."""
  with pytest.raises(UserError, match='reader'):
    Reader(**settings)
