"""Tests that each epoch is a pseudorandom permutation of the examples."""

import itertools

import numpy as np
import pytest
import scipy.stats

from tests.faults.counts import further
from vit_jax.data.pipeline import order

IMAGENET_21K = 14_197_122
# Chi-square statistics must be below this quantile of their distribution;
# the seeds are fixed, so the tests either pass always or fail always.
UNLIKELY = 1 - 1e-4


def epoch(number, n, seed):
  """Returns the order of one epoch."""
  positions = np.arange(number * n, (number + 1) * n)
  return order.shuffled(positions, n, seed)


def assert_uniform(values, bins):
  """Checks Pearson's statistic of integers in [0, bins)."""
  counts = np.bincount(values, minlength=bins)
  limit = scipy.stats.chi2.ppf(UNLIKELY, bins - 1)
  assert scipy.stats.chisquare(counts).statistic < limit


@pytest.mark.parametrize(
  'n',
  [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 50_000],
)
def test_every_epoch_is_a_permutation(n):
  """Each index occurs once per epoch, also at positions beyond 2^32."""
  for seed in (0, 1, 2**32 - 1):
    for number in (0, 1, 1000, 5_000_000_000 // n):
      indices = epoch(number, n, seed)
      assert indices.dtype == np.int64
      np.testing.assert_array_equal(np.sort(indices), np.arange(n))


@pytest.mark.parametrize('n', [100, 50_000])
def test_epochs_and_seeds_differ(n):
  """Two epochs or seeds agree as rarely as two random orders."""
  orders = [np.arange(n)]
  orders += [
    epoch(number, n, seed) for number in (0, 1, 2) for seed in (0, 1, 7)
  ]
  for first, second in itertools.combinations(orders, 2):
    # Fixed points of a random permutation: Poisson with mean 1.
    assert (first == second).sum() <= 8


@pytest.mark.parametrize('seed', range(5))
def test_the_first_examples_are_uniform_and_unrelated(seed):
  """So are the distances between consecutive ones of the first 10,000."""
  indices = order.shuffled(np.arange(10_001), IMAGENET_21K, seed)
  distance = np.diff(indices) % IMAGENET_21K
  bins = 100
  for values in (indices, distance):
    assert_uniform(values * bins // IMAGENET_21K, bins)
  assert_uniform(indices % bins, bins)


@pytest.mark.slow
@pytest.mark.parametrize('n', [10, *further(3)])
def test_every_example_comes_first_equally_often(n):
  """The first index is uniform over seeds and over epochs."""
  start = np.zeros(1, np.int64)
  by_seed = [order.shuffled(start, n, seed)[0] for seed in range(1000)]
  assert_uniform(np.array(by_seed), n)
  assert_uniform(order.shuffled(np.arange(50_000) * n, n, 0), n)


@pytest.mark.parametrize(
  'skipped', [(), (0,), (3,), (0, 1, 2), (2, 5, 6, 20), (6, 2, 5, 2), (100,)]
)
def test_batch_index_counts_what_is_not_skipped(skipped):
  """The s-th batch is the s-th natural number not on the skip list."""
  allowed = [index for index in range(60) if index not in skipped]
  for step in range(30):
    assert order.batch_index(step, skipped) == allowed[step]


@pytest.mark.parametrize('varied', ['position', 'attempt', 'seed'])
def test_replacements_depend_on_each_argument(varied):
  """Replacements are uniform over positions, attempts and seeds."""
  n, bins = 1_000_000, 100
  cases = [
    dict(position=5, attempt=1, seed=0) | {varied: number}
    for number in range(1, 5001)
  ]
  found = np.array([order.replacement(num_examples=n, **x) for x in cases])
  assert 0 <= found.min() and found.max() < n
  assert len(np.unique(found)) > 4900  # about a dozen pairs are equal by chance
  assert_uniform(found * bins // n, bins)


@pytest.mark.parametrize('batch_size, repeats', [(1024, 3), (96, 3), (10, 2)])
def test_repeated_copies_are_not_adjacent(batch_size, repeats):
  """Each example occurs `repeats` times, in order."""
  batches = 7
  positions = np.arange(batches * batch_size)
  drawn = order.repeated(positions, batch_size, repeats)
  assert drawn.dtype == np.int64
  counts = np.bincount(drawn)
  assert (counts[:-1] == repeats).all() and counts[-1] <= repeats
  for batch in drawn.reshape(batches, batch_size):
    # Rows are mixed with the left neighbour (the first with the last), or in
    # micro-batches with the row `parts` before.
    for parts in (1, 2):
      for part in batch.reshape(-1, parts).T:
        assert (part != np.roll(part, 1)).all()
    assert batch.max() - batch.min() <= batch_size // repeats + 1
  some = np.random.default_rng(0).permutation(positions)[:50]
  np.testing.assert_array_equal(
    order.repeated(some, batch_size, repeats), drawn[some]
  )
  np.testing.assert_array_equal(order.repeated(some, batch_size, 1), some)


def test_positions_of_several_datasets():
  """Sizes and seeds for each position give the values of separate calls."""
  sizes = np.array([1, 2, 3, 4, 5, 16, 17, 1000, 2**40, 2**53 + 1])
  seeds = np.arange(10, dtype=np.uint64) * np.uint64(2**60)
  positions = np.arange(10) * 12_345_678_901
  found = order.shuffled(positions, sizes, seeds)
  for i in range(10):
    one = order.shuffled(positions[i : i + 1], int(sizes[i]), int(seeds[i]))
    assert found[i] == one[0]


def test_balanced_groups_and_their_epochs():
  """Each group is once in a turn, and read in whole epochs of its own."""
  counts = np.array([1, 7, 7, 200])
  positions = np.arange(4 * 14)
  group, row = order.balanced(positions, counts, 5)
  turns = group.reshape(-1, 4)
  assert (np.sort(turns) == np.arange(4)).all()
  assert len({tuple(turn) for turn in turns.tolist()}) > 5
  rows = {k: row[group == k] for k in range(4)}
  assert (rows[0] == 0).all() and len({*rows[3]}) == 14
  for k in (1, 2):
    assert (np.sort(rows[k].reshape(2, 7)) == np.arange(7)).all()
    assert (rows[k][:7] != rows[k][7:]).any()
  assert (rows[1] != rows[2]).any()
  some = np.random.default_rng(0).permutation(positions)[:9]
  found = order.balanced(some, counts, 5)
  np.testing.assert_array_equal(found, (group[some], row[some]))
  other, other_rows = order.balanced(positions, counts, 6)
  assert (other != group).any()
  # The order inside a group also depends on the seed.
  assert (other_rows[other == 3] != rows[3]).mean() > 0.5
