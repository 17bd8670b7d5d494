"""Tests that split names have the meaning that they have in TFDS."""

import numpy as np
import pytest

from vit_jax.data.storage import splits
from vit_jax.errors import UserError

LENGTHS = {'train': 2000, 'validation': 10, 'test': 100}


@pytest.mark.parametrize(
  'spec, expected',
  [
    ('train', [('train', 0, 2000)]),
    ('train[:99%]', [('train', 0, 1980)]),
    ('train[1000:]', [('train', 1000, 2000)]),
    ('train[-5:]', [('train', 1995, 2000)]),
    ('validation[:33%]', [('validation', 0, 3)]),  # rounded to the nearest
    ('validation[:66%]', [('validation', 0, 7)]),
    ('train[:10%]+test[5:7]', [('train', 0, 200), ('test', 5, 7)]),
    ('test + train[:1]', [('test', 0, 100), ('train', 0, 1)]),
    ('all', [('train', 0, 2000), ('validation', 0, 10), ('test', 0, 100)]),
  ],
)
def test_resolve_split_names(spec, expected):
  """Names, slices, percentages and sums."""
  parts = splits.resolve(spec, LENGTHS)
  assert [(name, rows.start, rows.stop) for name, rows in parts] == expected


@pytest.mark.parametrize(
  'spec, words',
  [
    ('trian', r"did you mean 'train'.*train\[:99%\]"),
    ('train+tset', r"'tset'.*'train\+tset'.*test"),
    ('', 'allowed: test, train'),
    *((f'train[{x}', r'train \(2000 ex') for x in ('', ':2001]', ':101%]')),
    *((f'train[{x}]', 'without examples') for x in ('0:0', '9:5', ':1shard')),
    ('all[:5]', r"'all\[:5\]'.*train \(2000 examples\)"),
  ],
)
def test_messages_of_wrong_splits(spec, words):
  """The message contains the given split and the existing ones."""
  with pytest.raises(UserError, match=words):
    splits.resolve(spec, LENGTHS)


def test_selection_contains_every_example_of_its_parts():
  """In order, and none beyond."""
  spec = 'train[3:5]+test[-1:]+validation'
  selection = splits.Selection(spec, LENGTHS)
  expected = [('train', 3), ('train', 4), ('test', 99)]
  expected += [('validation', i) for i in range(10)]
  assert list(selection) == expected
  for index in (-1, 13):
    with pytest.raises(IndexError):
      selection[index]


@pytest.mark.parametrize('there', ['val', 'validation'])
def test_val_and_validation_are_aliases(there):
  """'all' does not count them twice."""
  found = {'train': 'a', there: 'b'}
  for asked in ('val', 'validation[:5]'):
    name = asked.partition('[')[0]
    assert splits.with_alias(found, asked)[name] == 'b'
  assert splits.with_alias(found, 'all') == found
  both = {'val': 'a', 'validation': 'b'}
  assert splits.with_alias(both, 'val+validation') == both


def test_percentages_are_rounded_like_tfds():
  """Parts of 1 % each cover everything once, for any size."""
  for n in np.random.default_rng(0).integers(100, 5000, 20).tolist():
    stops = []
    for i in range(100):
      [(_, rows)] = splits.resolve(f'train[{i}%:{i + 1}%]', {'train': n})
      assert rows.start == (stops[-1] if stops else 0)
      stops.append(rows.stop)
    assert stops[-1] == n
