"""Tests of several labels per image, and of numbers, up to the batch."""

import functools
import pickle

import jax
import numpy as np
import pytest
from indexed_source import mesh_of
from PIL import Image

from vit_jax.data import filters
from vit_jax.data.augment import targets
from vit_jax.data.balanced import Balanced
from vit_jax.data.contract import check_spec
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import stream
from vit_jax.data.sources import manifest
from vit_jax.errors import UserError

LABELS = ['cat|dog', 'emu', '|', 'dog | emu|cat', 'dog|']
ROWS = [[0, 1], [2], [], [1, 2, 0], [1]]
HOT = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
NUMBERS = [('1.5', '-2'), ('3', '4e2'), ('-.5', '0'), ('7', '1E-1'), ('0', '5')]


def write(folder, header, rows):
  """Writes an image and a line for each row; returns the path of the list."""
  lines = [header]
  for i, row in enumerate(rows):
    Image.new('RGB', (8, 8), (10 * i, 0, 0)).save(folder / f'{i}.png')
    lines.append(','.join((f'{i}.png', *row)))
  (folder / 'list.csv').write_text('\n'.join(lines))
  return str(folder / 'list.csv')


def several(folder, rows=LABELS, **keys):
  path = write(folder, 'image,label', [(row,) for row in rows])
  return manifest.Source('train', path=path, separator='|', **keys)


def numbers(folder, header='image,age,size', rows=NUMBERS, **keys):
  path = write(folder, header, rows)
  return manifest.Source('train', path=path, numbers=('age', 'size'), **keys)


def test_lists_of_labels(tmp_path):
  """The classes are those of all cells; no single label is invented."""
  source = several(tmp_path)
  assert source.class_names == ['cat', 'dog', 'emu']
  examples = [pickle.loads(pickle.dumps(source))[i] for i in range(5)]
  assert [each['labels'] for each in examples] == ROWS
  assert all('label' not in each for each in examples)
  assert source.labels().tolist() == [-1] * 5
  with pytest.raises(UserError, match='no valid labels'):
    Balanced(source)


def test_other_orders_of_classes_are_mapped_by_name(tmp_path):
  (tmp_path / 'classes.txt').write_text('emu\ncat\ndog\n')
  source = several(tmp_path, class_map=str(tmp_path / 'classes.txt'))
  assert [source[i]['labels'] for i in (0, 1)] == [[1, 2], [0]]
  mapped = filters.matched(source, ['cat', 'dog', 'emu'], 'the head')
  assert [mapped[i]['labels'] for i in range(5)] == ROWS


def test_columns_of_numbers(tmp_path):
  """Labels and other columns are ignored, also without a column label."""
  source = numbers(tmp_path)
  assert source.class_names == ['age', 'size']
  for i, (age, size) in enumerate(NUMBERS):
    found = source[i]
    assert (found['age'], found['size']) == (float(age), float(size))
    assert 'label' not in found
  more = [(*row, 'x') for row in NUMBERS]
  other = numbers(tmp_path, 'image,age,size,note', more)
  assert other[1]['size'] == 400 and other.num_classes == 2


def test_other_targets_have_another_fingerprint(tmp_path):
  before = several(tmp_path).fingerprint
  assert several(tmp_path).fingerprint == before
  changed = several(tmp_path, ['cat', *LABELS[1:]]).fingerprint
  assert changed['class_names'] == before['class_names']
  assert changed['listing'] != before['listing']
  before = numbers(tmp_path).fingerprint
  rows = [('1.6', '-2'), *NUMBERS[1:]]
  assert numbers(tmp_path, rows=rows).fingerprint != before


@pytest.mark.parametrize('cell', ['cat;dog', '"cat,dog"', '', '" "'])
def test_messages_of_wrong_labels(tmp_path, cell):
  text = cell.strip('"')
  message = f"line 3 has .*'label': '{text}'.*source.separator"
  with pytest.raises(UserError, match=message):
    several(tmp_path, ['cat', cell, *LABELS])


def test_messages_of_classes_that_are_not_listed(tmp_path):
  (tmp_path / 'classes.txt').write_text('cat\ndog\n')
  with pytest.raises(UserError, match="line 3, has the class 'emu'"):
    several(tmp_path, class_map=str(tmp_path / 'classes.txt'))
  path = write(tmp_path, 'image,kind', [('cat|dog',)])
  with pytest.raises(UserError, match="'kind': 'cat"):
    manifest.Source('train', path=path, separator='|')


@pytest.mark.parametrize('text', ['nan', 'inf', '', '3;5', '1e99', 'old'])
def test_messages_of_wrong_numbers(tmp_path, text):
  rows = [NUMBERS[0], ('1', text), *NUMBERS]
  with pytest.raises(UserError, match='line 3 has.*source.numbers'):
    numbers(tmp_path, rows=rows)


@pytest.mark.parametrize('kind', ['TrainTransform', 'EvalTransform'])
def test_batches_of_both_transforms(tmp_path, kind):
  """`labels` are zeros and ones; `numbers` are in the order of the config."""
  make = functools.partial(getattr(targets, kind), (4, 4))
  hot, pair = make(classes=3), make(numbers=('size', 'age'))
  source, rng = several(tmp_path), np.random.default_rng(0)
  rows = [hot(source[i], rng) for i in range(5)]
  assert rows[0].keys() == {'image', 'labels'}
  labels = np.array([row['labels'] for row in rows])
  np.testing.assert_array_equal(labels, np.float32(HOT), strict=True)
  row = pair(numbers(tmp_path)[1], rng)
  assert row.keys() == pair.spec.keys() == {'image', 'numbers'}
  np.testing.assert_array_equal(row['numbers'], np.float32([400, 3]))


def test_padding_rows_are_masked(tmp_path):
  """Padding has no label, but its mask is False."""
  transform = targets.EvalTransform((4, 4), classes=3)
  source = several(tmp_path)
  with stream.eval_batches(source, transform, 4, mesh_of(data=2)) as batches:
    first, last = map(jax.device_get, batches)
  np.testing.assert_array_equal(first['labels'], HOT[:4])
  assert last['mask'].tolist() == [True, False, False, False]
  np.testing.assert_array_equal(last['labels'][0], HOT[4])


SEVERAL = targets.EvalTransform((4, 4), classes=2)
AGE = targets.EvalTransform((4, 4), numbers=('age',))


@pytest.mark.parametrize(
  'transform, values, error, words',
  [
    (SEVERAL, {'labels': [2]}, DecodeError, 'label .2.; allowed: 0 to 1'),
    (SEVERAL, {'labels': [-1]}, DecodeError, 'label .-1.'),
    (SEVERAL, {'labels': None}, DecodeError, "'labels' is None"),
    (SEVERAL, {'labels': ['cat']}, DecodeError, 'cat'),
    (SEVERAL, {'age': 1.0}, UserError, 'but not labels:.*separator'),
    (AGE, {'age': 'old'}, DecodeError, "'age': 'old'"),
    (AGE, {'age': None}, DecodeError, "'age': None"),
    (AGE, {'age': np.nan}, DecodeError, "'age': nan"),
    (AGE, {'age': 1e99}, DecodeError, r"'age': 1e\+99"),
    (AGE, {'age': 10**400}, DecodeError, 'allowed: finite numbers'),
    (AGE, {'years': 1.0}, UserError, 'but not age:'),
  ],
)
def test_wrong_targets(transform, values, error, words):
  """Wrong values are bad records; a missing field is an error of the config."""
  image = np.zeros((4, 4, 3), np.uint8)
  with pytest.raises(error, match=words):
    transform({'image': image} | values)


def test_one_of_the_keys_is_required():
  with pytest.raises(UserError, match=r'float32 \[0\].*at least 1'):
    check_spec(targets.TrainTransform((4, 4)))
