"""Tests of mapping labels by name for a head trained on other data."""

import pytest
from indexed_source import Numbered

from vit_jax.data import filters
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError

PETS = ['bird', 'cat', 'dog', 'eel']


class _Source(Numbered):
  """Examples whose label is their index, with given class names."""

  def __init__(self, names):
    super().__init__(len(names), bad_label=7)
    self.class_names = list(names)
    self.num_classes = len(names)


def _labels(names, known):
  source = filters.matched(_Source(names), known, 'the weights')
  return [source[i]['label'] for i in range(len(names))], source


@pytest.mark.parametrize(
  'names, labels',
  [
    (['dog', 'cat', 'eel', 'bird'], [2, 1, 3, 0]),
    (['eel'], [3]),
    (['cat', 'dog'], [1, 2]),
  ],
)
def test_labels_follow_the_names(names, labels):
  """Labels are mapped for another order and for a subset of the classes."""
  found, source = _labels(names, PETS)
  assert found == labels and len(source) == len(names)
  assert source.class_names == PETS and source.num_classes == len(PETS)


@pytest.mark.parametrize(
  'names, known',
  [
    (PETS[:2], PETS),  # a subset
    (['crane', 'crane', 'cat'], ['crane', 'crane', 'cat']),  # ImageNet has two
    (['class 0', 'class 1'], PETS),  # numbers instead of names
    (['00', '01'], ['class_0', 'Class 1']),
    ([], PETS),
  ],
)
def test_labels_that_stay(names, known):
  """Equal names, or numbers in place of names, are not mapped."""
  found, source = _labels(names, known)
  assert found == list(range(len(names)))
  assert isinstance(source, _Source)


@pytest.mark.parametrize(
  'names, known, words',
  [
    (['bird', 'dog', 'zcat'], PETS[:3], ["head ('cat')", "data ('zcat')"]),
    (['1', '2', '44'], PETS, ["data ('1', '2', '44')"]),
    (['cat', 'crane', 'crane'], ['crane', 'crane', 'cat'], ['another order']),
  ],
)
def test_other_classes_are_refused(names, known, words):
  """The message contains the names that differ."""
  with pytest.raises(UserError) as error:
    _labels(names, known)
  for word in ['numbered/train', 'the weights', *words]:
    assert word in str(error.value)


def test_a_bad_label_stays_bad():
  """A label out of range is not mapped to one of the head's classes."""
  source = _Source(['eel', 'dog', 'cat'])
  source.bad['label'] = 1  # its label is the number of classes
  mapped = filters.matched(source, PETS, 'the weights')
  with pytest.raises(DecodeError, match='label 3; allowed: 0 to 2'):
    mapped[1]
