"""Tests of mixtures: weights, epochs of each member, and determinism."""

import contract
import numpy as np
import pytest
from indexed_source import mesh_of, train

from vit_jax.data import filters
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.data.pipeline import stream
from vit_jax.data.sources import mixture, synthetic
from vit_jax.errors import UserError

SIZES = dict(a=300, b=70, c=11)
WEIGHTS = dict(a=6, b=3.0, c=1.0)


def member(size, weight, **settings):
  return dict(name='synthetic', num_examples=size, weight=weight) | settings


def open_mixture(split='train', weights=None, **changes):
  weights = weights or WEIGHTS
  members = {name: member(SIZES[name], w) for name, w in weights.items()}
  return mixture.Source(split, members=members | changes)


def located(positions, seed=0, source=None):
  """Returns (member, index in it) at positions."""
  source = source or open_mixture()
  starts = np.cumsum([0, *map(len, source._members)])
  indices = source.locate(np.asarray(positions), seed)
  members = np.searchsorted(starts, indices, 'right') - 1
  return members, indices - starts[members]


def test_a_mixture_is_the_concatenation_of_its_members():
  """This is its order as an ordinary source."""
  members = [synthetic.Source('train', num_examples=n) for n in SIZES.values()]
  source = open_mixture()
  expected = [(each, i) for each in members for i in range(len(each))]
  assert len(source) == len(expected)
  for index in range(0, len(source), 7):
    each, i = expected[index]
    np.testing.assert_equal(source[index], each[i])
    assert source.where(index) == each.where(i)
  for index in (-1, len(source)):
    with pytest.raises(IndexError):
      source[index]


@pytest.mark.parametrize('start', [0, 1000, 5_000_000_000_000])
def test_members_have_their_weights(start):
  """They are exact over a cycle of slots, and nearly exact over a batch."""
  members, _ = located(start + np.arange(mixture.SLOTS))
  np.testing.assert_array_equal(np.bincount(members), [600, 300, 100])
  for part in members.reshape(4, 250):
    assert np.abs(np.bincount(part) / 250 - [0.6, 0.3, 0.1]).max() < 0.1


def test_each_member_is_read_in_epochs():
  """Its examples are those of a training on this member."""
  members, indices = located(np.arange(6000))
  for number, size in enumerate(SIZES.values()):
    seen = indices[members == number]
    for epoch in np.split(seen, range(size, len(seen), size))[:-1]:
      np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    assert (seen[:size] != np.arange(size)).any()
    assert (seen[:size] != seen[size : 2 * size]).any()  # each in a new order


def test_locate_depends_on_the_position_only():
  """Positions may be requested in any order and subset."""
  whole = open_mixture().locate(np.arange(5000), 3)
  some = np.random.default_rng(0).integers(0, 5000, 700)
  np.testing.assert_array_equal(open_mixture().locate(some, 3), whole[some])


def test_seeds_change_the_pattern_and_the_orders():
  """The orders of the members differ, too."""
  positions = np.arange(2000)
  (members, indices), (others, other_indices) = (
    located(positions, seed) for seed in (0, 1)
  )
  assert (members != others).mean() > 0.2
  same = (members == 0) & (others == 0)
  assert (indices[same] != other_indices[same]).mean() > 0.9
  twins = dict(x=member(500, 1.0), y=member(500, 1.0))
  twins = mixture.Source('train', members=twins)
  members, indices = located(positions, source=twins)
  first, second = (indices[members == i][:500] for i in (0, 1))
  assert (first != second).mean() > 0.9
  # With one member, the pattern of the slots is the same for all seeds.
  source = open_mixture(weights=dict(a=1))
  first, second = (source.locate(np.arange(300), seed) for seed in (0, 1))
  assert (first != second).mean() > 0.9


@pytest.mark.parametrize(
  'weights, counts',
  [
    ([1, 1, 1], [334, 333, 333]),
    ([70, 30.0], [700, 300]),
    ([999, 1], [999, 1]),
    ([5], [1000]),
  ],
)
def test_slot_counts(weights, counts):
  """They sum to a thousand and are as close to the weights as possible."""
  weights = dict(zip('abc', weights, strict=False))
  assert mixture.slot_counts(weights) == counts


def streamed(source, start, steps, **options):
  """Returns the batches of a stream from a step on."""
  settings = dict(transform=EvalTransform((32, 32)), seed=5, mesh=mesh_of())
  return train(source, 8, steps, start=start, **settings, **options)


def test_a_stream_uses_the_order_of_the_mixture():
  """A resumed stream has the same batches."""
  source = open_mixture()

  def labels(start, steps):
    batches = streamed(source, start, steps)
    return np.concatenate([batch['label'] for batch in batches]).tolist()

  indices = source.locate(np.arange(32), 5).tolist()
  expected = [source[i]['label'] for i in indices]
  assert labels(0, 4) == expected and labels(2, 2) == expected[16:]


def test_bad_records_are_replaced_within_their_member():
  """Every row has an example of the member that the pattern selects.

  A bad record counts once, although it is read every few steps.
  """
  # Records 0 and 5 of the 10 of 'b' are bad.
  damaged = member(10, 1.0, name='tests.multiprocess.damaged')
  members = dict(a=member(490, 1.0), b=damaged)
  source, seen = mixture.Source('train', members=members), []
  reader = stream.Reader(on_bad_record='skip', max_bad_share=2 / 500)
  found = streamed(
    source, 0, 25, reader=reader, report=lambda _, record: seen.append(record)
  )
  assert sorted(record.index for record in seen) == [490, 495]
  indices = source.locate(np.arange(200), 5)
  images = np.concatenate([batch['image'] for batch in found])
  replaced = np.concatenate([batch['replaced'] for batch in found])
  assert replaced.astype(bool).tolist() == np.isin(indices, [490, 495]).tolist()
  assert replaced.sum() > 10
  good = [source[i]['image'] for i in range(490, 500) if i % 5]
  for index, image, times in zip(indices, images, replaced, strict=True):
    allowed = good if times else [source[int(index)]['image']]
    assert any(np.array_equal(image, other) for other in allowed)


def test_splits_of_members(tmp_path):
  """One split for all members, or one for each of some."""
  for name, count in (('x', 6), ('y', 4)):
    rows = [f'{i}.png,{i % 2},{"train" if i % 3 else "val"}' for i in range(9)]
    path = tmp_path / f'{name}.csv'
    path.write_text('\n'.join(['image,label,split', *rows[:count]]))
  for i in range(9):
    (tmp_path / f'{i}.png').write_bytes(contract.png(i))

  def open_split(split):
    members = {
      name: dict(name='manifest', path=f'{tmp_path}/{name}.csv', weight=1.0)
      for name in ('x', 'y')
    }
    return mixture.Source(split, members=members)

  assert [len(open_split(s)) for s in ('train', 'val', 'all')] == [6, 4, 10]
  assert len(open_split('train[:50%]')) == 3
  alone = open_split('y/val')
  expected = [(contract.png(0), 0), (contract.png(3), 1)]
  contract.check(alone, expected, ['y.csv, line 2'])
  mixed = open_split('y/all, x/train[:1]')  # in the order of the members
  assert len(mixed) == 5
  assert 'x.csv' in mixed.where(0) and 'y.csv' in mixed.where(1)
  for wrong in ('z/train', 'x/train,y', 'x/', 'x/train,x/val'):
    with pytest.raises(UserError, match='allowed: x, y'):
      open_split(wrong)


def test_labels_of_all_members_are_mapped(tmp_path):
  """A head may have the classes in another order than the data."""
  (tmp_path / 'list.csv').write_text('image,label\n1.png,cat|dog\n2.png,dog\n')
  for number in (1, 2):
    (tmp_path / f'{number}.png').write_bytes(contract.png(number))
  path = str(tmp_path / 'list.csv')
  several = dict(name='manifest', path=path, separator='|', weight=1.0)
  source = mixture.Source('train', members=dict(a=several, b=several))
  mapped = filters.matched(source, ['dog', 'cat'], 'the head')
  assert [mapped[i]['labels'] for i in range(4)] == [[1, 0], [0]] * 2


@pytest.mark.parametrize(
  'changed, words',
  [
    (member(5, 0.0), 'members.d.weight is 0.0.* above 0'),
    (dict(name='synthetic'), 'members.d.weight is missing'),
    (member(5, 0.004), "'d'.* at least 1/1000"),
    (dict(weight=1.0), 'members.d.name is missing'),
    (dict(name='syntetic', weight=1.0), "did you mean 'synthetic'"),
    (member(5, 1.0, hight=3), "d.hight.*did you mean 'height'"),
    (dict(name='folder', weight=1.0), 'd.path is missing'),
    (member(5, 1.0, num_classes=9), '10 classes.* 9 .*same classes'),
  ],
)
def test_messages_of_wrong_members(changed, words):
  """The message names the member and the key."""
  with pytest.raises(UserError, match=words):
    open_mixture(d=changed)
