"""Tests of few-shot regression and nearest neighbours against scikit-learn."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from noise_source import (
  CLASSES,
  TEST,
  TRAIN,
  WEIGHTS,
  Colours,
  features_of,
  setting,
)
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

from vit_jax.data import filters
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.evaluators import fewshot, neighbours
from vit_jax.evaluators.features import Labelled


@pytest.mark.parametrize('shots', [1, 3, 10])
def test_fewshot_regression_equals_scikit_learn(shots):
  """There may be fewer examples than features, or more."""
  x, y = features_of(TRAIN)
  rows = fewshot.draw(y, shots, 0)
  found = fewshot.fit(Labelled(x[rows], y[rows]), CLASSES, 1024.0)
  x = x.astype(np.float64)
  mean, deviation = x[rows].mean(0), x[rows].std(0) + 1e-5

  def inputs(x):
    return np.hstack([(x - mean) / deviation, np.full((len(x), 1), 100.0)])

  ridge = Ridge(alpha=1024.0, fit_intercept=False, solver='svd')
  ridge.fit(inputs(x[rows]), np.where(y[rows, None] == range(CLASSES), 1, -1))
  test, _ = features_of(TEST)
  expected = ridge.predict(inputs(test))
  # Scores also depend on the constant and the penalty, unlike the best class.
  np.testing.assert_allclose(found(test), expected, rtol=1e-5, atol=1e-7)
  assert len(set(expected.argmax(1).tolist())) > 2


def test_draws_are_balanced_by_class():
  """A draw with more shots contains the smaller one."""
  y = TRAIN.given
  for shots in (1, 4, 9):
    rows = fewshot.draw(y, shots, 0)
    assert np.bincount(y[rows]).tolist() == [shots] * CLASSES
    assert len(set(rows.tolist())) == len(rows)
  few, more, other = (fewshot.draw(y, *a) for a in ((4, 0), (9, 0), (4, 1)))
  assert set(few.tolist()) < set(more.tolist())
  assert set(few.tolist()) != set(other.tolist())


@pytest.mark.parametrize('devices, batch_size', [(1, 7), (4, 24)])
def test_fewshot_accuracy_is_the_mean_over_draws(devices, batch_size):
  """It does not depend on the batch size and devices."""
  made = setting(devices=devices, batch_size=batch_size)
  keys = dict(split='test', shots=(1, 5), num_draws=2)
  found = fewshot.Evaluator(made, **keys).run(jnp.array(WEIGHTS))
  train, test = Labelled(*features_of(TRAIN)), Labelled(*features_of(TEST))
  expected = {}
  for shots in (1, 5):
    scores = []
    for number in (0, 1):
      rows = fewshot.draw(train.labels, shots, number)
      few = Labelled(train.features[rows], train.labels[rows])
      answer = fewshot.fit(few, CLASSES, 1024.0)(test.features).argmax(axis=1)
      scores.append((answer == test.labels).mean())
    expected[f'{shots}shot'] = np.mean(scores)
    expected[f'{shots}shot_std'] = np.std(scores, ddof=1)
  assert found == pytest.approx(expected, abs=1e-9)
  assert found['5shot'] > 0.5 > 1 / CLASSES


@pytest.mark.parametrize(
  'devices, batch_size, temperature',
  [(1, 16, 0.07), (2, 10, 0.07), (1, 16, 0.005), (1, 16, 0.0015)],
)
def test_neighbours_equal_scikit_learn(devices, batch_size, temperature):
  """Cosine distance, votes weighted with exp(similarity / temperature).

  Below 0.0112, these weights are infinite in 32 bits.
  """
  evaluator = neighbours.Evaluator(
    setting(devices=devices, batch_size=batch_size),
    split='test',
    ks=(1, 7, 40),
    temperature=temperature,
  )
  found = evaluator.run(jnp.array(WEIGHTS))
  x, y = features_of(TRAIN)
  test, labels = features_of(TEST)
  for k in (1, 7, 40):
    peer = KNeighborsClassifier(
      k,
      metric='cosine',
      weights=lambda d: np.exp((1 - d.astype(float)) / temperature),
    )
    accuracy = (peer.fit(x, y).predict(test) == labels).mean()
    assert found[f'{k}nn'] == pytest.approx(accuracy, abs=1e-9)
  assert found['7nn'] > 0.5


BAD = dict(train=Colours(203, 1, bad=[3]), on_bad_record='skip')


@pytest.mark.parametrize(
  'module, data, keys, words',
  [
    (fewshot, {}, dict(shots=(1, 60)), "'.': .*shots=60"),
    (fewshot, dict(train=Colours(2, 1)), dict(shots=(1,)), 'has 0 example'),
    (fewshot, {}, dict(shots=(0,)), 'shots is 0'),
    (fewshot, {}, dict(shots=()), 'number of shots is 0'),
    (fewshot, {}, dict(num_draws=0), 'num_draws is 0'),
    (fewshot, {}, dict(l2=0.0), 'l2 is 0'),
    (neighbours, {}, dict(ks=()), 'ks is 0'),
    (neighbours, {}, dict(ks=(500,)), '203 usable.*ks .*500'),
    (neighbours, BAD, dict(ks=(203,)), '202 usable.*ks .*203'),
  ],
)
def test_wrong_settings_are_refused(module, data, keys, words):
  made = setting(**data, **(dict(max_bad_share=0.1) if data else {}))
  with pytest.raises(UserError, match=words):
    module.Evaluator(made, split='test', **keys).run(jnp.array(WEIGHTS))


def test_features_that_are_not_finite_are_refused_at_their_batch(monkeypatch):
  """A whole pass would take hours; the first of 13 batches is enough."""
  seen = []
  made = setting()._replace(check=lambda: seen.append(None))
  evaluator = neighbours.Evaluator(made, split='test', ks=(7,))
  with pytest.raises(UserError, match='features of .*not finite.*model.dtype'):
    evaluator.run(jnp.full_like(WEIGHTS, jnp.nan))
  assert len(seen) < 5


class Split(Source):
  """A part of the coloured noise with known positions."""

  num_classes, class_names = CLASSES, list('abcde')

  def __init__(self, name, positions):
    self.name, self.positions = name, np.asarray(positions)

  def __len__(self):
    return len(self.positions)

  def __getitem__(self, index):
    return TRAIN[int(self.positions[index])]

  def rows(self):
    yield 'train', self.positions


SPLITS = {
  'train': range(203),
  'train[0%:90%]': range(180),
  'train[90%:]': range(180, 203),
}


def split_setting(train_split='train'):
  """Returns a setting whose evaluation split is a part of its folder."""
  found = setting()._replace(train_split=train_split)
  return found._replace(open_source=lambda s: Split(s, SPLITS[s]))


def on_a_part(found, **keys):
  """Returns an evaluator of a part of the folder of a setting."""
  return neighbours.Evaluator(found, split='train[90%:]', ks=(3,), **keys)


def test_features_are_fitted_on_the_training_split():
  """By default, no evaluated example is fitted."""
  evaluator = on_a_part(split_setting('train[0%:90%]'))
  assert len(evaluator._train) == 180 and len(evaluator._source) == 23


def test_examples_that_training_leaves_out_are_not_fitted(tmp_path):
  """They may be copies of evaluated images; other data is not affected."""
  whole = Split('train', SPLITS['train'])
  lines = filters.list_entries(whole, np.array([3, 150, 200]))
  path = tmp_path / 'overlap.jsonl'
  path.write_text('\n'.join(map(json.dumps, lines)))
  found = split_setting('train[0%:90%]')._replace(leave_out=str(path))
  evaluator = on_a_part(found)
  assert len(evaluator._train) == 178 and len(evaluator._source) == 23
  moved = [line | {'checksum': '00'} for line in lines]
  path.write_text('\n'.join(map(json.dumps, moved)))
  assert len(on_a_part(found)._train) == 180


def test_overlapping_splits_are_refused():
  """The message names both splits and the number of common examples."""
  with pytest.raises(
    UserError, match=r"23 of the 23.*'train\[90%:\]'.*'train'"
  ):
    on_a_part(split_setting(), train_split='train')


def test_other_data_is_fitted_on_its_own_training_split():
  """The split of the run does not apply to another source."""
  opened = []
  found = split_setting('train[51200:]')._replace()

  class Setting(type(found)):
    def open_other(self, section, split):
      opened.append(split)
      return Split(split, SPLITS.get(split, range(203, 210)))

  neighbours.Evaluator(
    Setting(*found), split='test', source={'name': 'other'}, ks=(3,)
  )
  assert opened == ['test', 'train']
