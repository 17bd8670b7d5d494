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
from vit_jax.evaluators import features as features_lib
from vit_jax.evaluators import fewshot, neighbours


@pytest.mark.parametrize('shots', [1, 3, 10])
def test_fewshot_regression_equals_scikit_learn(shots):
  """There may be fewer examples than features, or more."""
  x, y = features_of(TRAIN)
  rows = fewshot.draw(y, shots, 0)
  found = fewshot.fit(features_lib.Labelled(x[rows], y[rows]), CLASSES, 1024.0)
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


@pytest.mark.parametrize('devices, batch_size', [(1, 16), (1, 7), (4, 24)])
def test_fewshot_accuracy_is_the_mean_over_draws(devices, batch_size):
  """It does not depend on the batch size and devices."""
  evaluator = fewshot.Evaluator(
    setting(devices=devices, batch_size=batch_size),
    split='test',
    shots=(1, 5),
    num_draws=2,
  )
  x, y = features_of(TRAIN)
  test, labels = features_of(TEST)
  found = evaluator.run(jnp.array(WEIGHTS))
  assert list(found) == ['1shot', '1shot_std', '5shot', '5shot_std']
  for shots in (1, 5):
    scores = []
    for number in (0, 1):
      rows = fewshot.draw(y, shots, number)
      few = features_lib.Labelled(x[rows], y[rows])
      answer = fewshot.fit(few, CLASSES, 1024.0)(test).argmax(axis=1)
      scores.append((answer == labels).mean())
    assert found[f'{shots}shot'] == pytest.approx(np.mean(scores), abs=1e-9)
    spread = np.std(scores, ddof=1)
    assert found[f'{shots}shot_std'] == pytest.approx(spread, abs=1e-9)
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


def test_bad_records_are_left_out():
  """They are neither neighbours nor evaluated."""
  train, test = Colours(203, 1, bad=[3, 50]), Colours(61, 2, bad=[60])
  evaluator = neighbours.Evaluator(
    setting(train, test, on_bad_record='skip', max_bad_share=0.1),
    split='test',
    ks=(7,),
  )
  x, y = features_of(TRAIN, np.delete(np.arange(203), [3, 50]))
  tx, ty = features_of(TEST, slice(60))
  labels, votes = neighbours.nearest(features_lib.Labelled(x, y), tx, 7, 0.07)
  expected = (neighbours.elected(labels, votes, CLASSES) == ty).mean()
  assert evaluator.run(jnp.array(WEIGHTS))['7nn'] == pytest.approx(expected)


def test_messages_of_wrong_settings():
  evaluator = fewshot.Evaluator(setting(), split='test', shots=(1, 60))
  with pytest.raises(UserError, match="of '.': .*shots=60"):
    evaluator.run(jnp.array(WEIGHTS))
  with pytest.raises(UserError, match='203 usable examples, .*ks .*500'):
    neighbours.Evaluator(setting(), split='test', ks=(500,))
  bad = setting(
    Colours(203, 1, bad=[3]), on_bad_record='skip', max_bad_share=0.1
  )
  evaluator = neighbours.Evaluator(bad, split='test', ks=(203,))
  with pytest.raises(UserError, match='202 usable examples, .*ks .*203'):
    evaluator.run(jnp.array(WEIGHTS))
  evaluator = neighbours.Evaluator(setting(), split='test', ks=(7,))
  with pytest.raises(UserError, match='features of .*not finite.*model.dtype'):
    evaluator.run(jnp.full_like(WEIGHTS, jnp.nan))
  with pytest.raises(UserError, match='ks is 0; .*at least 1'):
    neighbours.Evaluator(setting(), split='test', ks=())
  wrong_keys = dict(l2=0.0), dict(shots=(0,)), dict(shots=()), dict(num_draws=0)
  for wrong in wrong_keys:
    with pytest.raises(UserError, match='at least 1|above 0'):
      fewshot.Evaluator(setting(), split='test', **wrong)


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
