"""Tests of block masks against a generator in plain Python."""

import dataclasses
import functools
import itertools
import math
import pickle
import random

import numpy as np
import pytest
from indexed_source import assert_same, mesh_of, train

from vit_jax.data.augment import block_masks, multicrop
from vit_jax.data.augment.block_masks import TrainTransform
from vit_jax.data.pipeline import order
from vit_jax.data.pipeline.loader import Loader, LocalRows
from vit_jax.data.pipeline.workers import Reader
from vit_jax.data.sources import synthetic
from vit_jax.errors import UserError

GROUP, GRID = 16, (14, 14)


def theirs(rows, columns, count):
  """Draws a mask patch by patch, with Python's generator.

  A rectangle is a set of patches, so that nothing is shared with the module.
  """
  masked, largest_area = set(), int(0.5 * rows * columns)
  while len(masked) < count:
    limit = min(count - len(masked), largest_area)
    for _ in range(10):
      area = random.uniform(4, limit)
      ratio = math.exp(random.uniform(math.log(0.3), math.log(1 / 0.3)))
      height = round(math.sqrt(area * ratio))
      width = round(math.sqrt(area / ratio))
      if width >= columns or height >= rows:
        continue
      top = random.randint(0, rows - height)
      left = random.randint(0, columns - width)
      rows_of, columns_of = range(top, top + height), range(left, left + width)
      box = {*itertools.product(rows_of, columns_of)}
      if 0 < len(box - masked) <= limit:
        masked |= box
        break
    else:
      break
  return masked


def transform(group=GROUP, size=GROUP, parts=1, **keys):
  keys = dict(local_crops=0, patch_size=2) | keys
  return TrainTransform((28, 28), group=group, **keys).in_batches(size, parts)


def masks_of(of, positions, seed=0):
  """Returns the masks of examples, `[n, 2, patches]`, without their crops."""
  masks = []
  for position in positions:
    rng = np.random.default_rng([seed, position])
    counts = [of._count(slot, rng) for slot in of._slots(seed, position)]
    masks.append([block_masks.block_mask(of.grid, n, rng) for n in counts])
  return np.array(masks).reshape(len(masks), 2, -1)


@pytest.mark.parametrize(
  'grid, count', [(GRID, 3), (GRID, 7), ((3, 20), 12), ((20, 3), 12)]
)
def test_the_law_of_small_masks_is_that_of_an_independent_generator(
  grid, count
):
  """Numbers of patches, heights and widths, of few rectangles each.

  No rectangle has all rows or all columns, which matters for narrow grids.
  """
  draws, rng = 4000, np.random.default_rng(0)
  random.seed(0)

  def histograms(draw):
    """Counts patches, their rows and their columns, `[3, 21]`."""
    masks = [draw() for _ in range(draws)]
    sizes = [
      (len(mask), len({y for y, _ in mask}), len({x for _, x in mask}))
      for mask in masks
    ]
    return [np.bincount(size, minlength=21) for size in np.array(sizes).T]

  ours = histograms(
    lambda: np.argwhere(block_masks.block_mask(grid, count, rng)).tolist()
  )
  expected = histograms(lambda: theirs(*grid, count))
  for one, other in zip(ours, expected, strict=True):
    # Half the sum is the distance of two distributions, in [0, 1]; other
    # smallest rectangles or numbers of tries have .1 or more.
    assert np.abs(one - other).sum() / 2 / draws < 0.05


def test_masks_of_groups_fit_the_bound():
  """The largest number of masked patches is the sum over the intervals."""
  of = transform()
  masks = masks_of(of, range(20 * GROUP)).reshape(20, -1)
  counts = masks.sum(axis=1)
  ends = np.linspace(0.1, 0.5, GROUP + 1)[1:]
  assert of.largest_count == sum(int(196 * end) for end in ends)
  assert counts.max() <= of.largest_count
  assert counts.min() > 0.8 * of.largest_count


@pytest.mark.parametrize('parts', [1, 2, 4])
def test_each_micro_batch_consists_of_whole_groups(parts):
  """Rows i, i + parts, … of a batch; half of their crops are masked."""
  of = transform(group=4, size=16, parts=parts)
  for batch in range(3):
    masks = masks_of(of, range(16 * batch, 16 * batch + 16))
    for part in range(parts):
      groups = masks[part::parts].reshape(-1, 8, 196)
      assert (groups.any(2).sum(1) == 4).all()


def test_masks_depend_on_seed_and_position_only():
  """Crops are those of `multicrop`; another process gets the same masks."""
  source = synthetic.Source('train', num_examples=8)
  of = transform(group=4, size=8)
  plain = multicrop.TrainTransform((28, 28), local_crops=0)

  def load(of, seed, positions):
    positions = np.array(positions)
    loader = pickle.loads(pickle.dumps(Loader(source, of, seed, 'error')))
    batch = loader.buffers(len(positions))
    loader.fill(batch, LocalRows(positions % 8, positions), 0)
    return batch

  whole = load(of, 3, range(8))
  assert whole['masks'].shape == (8, 2, 196) and whole['masks'].dtype == bool
  some = load(of, 3, [6, 1])
  np.testing.assert_array_equal(some['masks'], whole['masks'][[6, 1]])
  crops = load(plain, 3, range(8))['global']
  np.testing.assert_array_equal(whole['global'], crops)
  for other in (load(of, 4, range(8)), load(of, 3, range(8, 16))):
    assert (other['masks'].any(2) != whole['masks'].any(2)).any()
  # The permutations are not those that shuffle the examples.
  examples = order.shuffled(np.arange(8), 8, 3)
  assert [of._slots(3, i) for i in range(4)] != examples.reshape(4, 2).tolist()


SIZES = ((0.5, 28, 14, 0), (0.2, 42, 14, 0), (0.3, 42, 28, 0))


def test_each_batch_has_one_of_several_sizes():
  """It depends on seed and step only, not on the reader or the first step."""
  source = synthetic.Source('train', num_examples=8)
  plain = transform(group=4, size=4, local_crops=1)
  of = dataclasses.replace(plain, sizes=SIZES)

  load = functools.partial(train, source, 4, transform=of, mesh=mesh_of())

  def sides(batches):
    return [(b['global'].shape[2], b['local'].shape[2]) for b in batches]

  whole = load(12)
  names = [(int(side), int(local)) for _, side, local, _ in SIZES]
  assert sides(whole) == [names[of.variant(0, step)] for step in range(12)]
  assert {*sides(whole)} == {*names} and sides(load(12, seed=1)) != sides(whole)
  assert_same(load(4, start=8), whole[8:])
  assert_same(load(4, reader=Reader(processes=1)), whole[:4])
  drawn = np.bincount([of.variant(0, step) for step in range(4000)]) / 4000
  np.testing.assert_allclose(drawn, [row[0] for row in SIZES], atol=0.03)


def test_wrong_sizes_and_groups_are_refused():
  for sizes in (((1, 28, 14),), ((0.5, 28, 14, 0),)):
    with pytest.raises(UserError, match=r'augment\.sizes'):
      transform(sizes=sizes)
  with pytest.raises(UserError, match=r'augment.group is 16.*8 examples'):
    transform(group=16, size=16, parts=2)
  assert transform(group=None, size=16, parts=2).group == 8
