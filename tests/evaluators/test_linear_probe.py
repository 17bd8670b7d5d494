"""Tests of linear probes against scikit-learn."""

import copy

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
from sklearn.linear_model import LogisticRegression

from vit_jax.evaluators import linear_probe
from vit_jax.evaluators.features import Labelled
from vit_jax.evaluators.linear_probe import Evaluator


def peer_of(x, y, l2):
  """Returns scikit-learn's regression with the equivalent regularization."""
  exact = dict(solver='newton-cholesky', tol=1e-10, max_iter=1000)
  return LogisticRegression(C=1 / (len(y) * l2), **exact).fit(x, y)


def standardised(x, by):
  x, by = x.astype(np.float64), by.astype(np.float64)
  return (x - by.mean(0)) / (by.std(0) + 1e-5)


@pytest.mark.parametrize('size, l2', [(203, 1e-3), (203, 0.1), (9, 1e-2)])
def test_regression_equals_scikit_learn(size, l2, monkeypatch):
  """Coefficients (about 5) agree to 5e-5; several blocks are used."""
  monkeypatch.setattr(linear_probe, '_BLOCK', 64)
  x, y = features_of(TRAIN, slice(size))
  test, labels = features_of(TEST)
  found = linear_probe.fit(Labelled(x, y), l2)
  theirs, test_features = standardised(x, x), standardised(test, x)
  peer = peer_of(theirs, y, l2)
  np.testing.assert_array_equal(found.classes, peer.classes_)
  np.testing.assert_allclose(found.kernel, peer.coef_.T, rtol=0, atol=5e-5)
  # Biases are defined up to a constant, because they are not penalized.
  ours, bias = (x - x.mean() for x in (found.bias, peer.intercept_))
  np.testing.assert_allclose(ours, bias, rtol=0, atol=5e-5)
  answers = peer.predict(test_features)
  assert found.accuracy(Labelled(test, answers)) == 1
  assert found.accuracy(Labelled(test, labels)) == (answers == labels).mean()
  assert len(set(answers.tolist())) > 2 and np.abs(found.kernel).max() > 0.05


def test_correlated_features_converge_in_50_steps(monkeypatch, caplog):
  """The spectrum spans five decades; plain L-BFGS takes 2,400 steps."""
  monkeypatch.setattr(linear_probe, '_ITERATIONS', 50)
  rng = np.random.default_rng(0)
  mixed = np.linalg.qr(rng.normal(size=(24, 24)))[0]
  z = rng.normal(size=(600, 24))
  x = ((z * np.logspace(0, -5, 24)) @ mixed).astype(np.float32)
  scores = z @ rng.normal(size=(24, 4)) + 2 * rng.gumbel(size=(600, 4))
  y = scores.argmax(axis=1).astype(np.int32)
  found = linear_probe.fit(Labelled(x, y), 1e-5)
  peer = peer_of(standardised(x, x), y, 1e-5)
  np.testing.assert_allclose(found.kernel, peer.coef_.T, rtol=0, atol=1e-5)
  assert np.abs(peer.coef_).max() > 10 and not caplog.text


def test_classes_without_examples_are_never_predicted():
  """They do not prevent convergence."""
  x, y = features_of(TRAIN)
  kept = np.isin(y, [1, 4, 3])
  found = linear_probe.fit(Labelled(x[kept], y[kept]), 1e-3)
  assert found.classes.tolist() == [1, 3, 4]
  assert found.kernel.shape == (12, 3)
  right = found.accuracy(Labelled(x, y))
  assert right == found.accuracy(Labelled(x[kept], y[kept])) * kept.mean()


@pytest.mark.parametrize('devices, batch_size', [(1, 7), (4, 24)])
def test_probe_chooses_on_held_out_examples(devices, batch_size):
  """It then fits on all examples; the reference is scikit-learn."""
  grid = (0.3, 1e-2, 1e-3)  # the last is best on its training data
  made = setting(devices=devices, batch_size=batch_size)
  keys = dict(split='test', l2=grid, held_out=0.2, seed=6)
  found = Evaluator(made, **keys).run(jnp.array(WEIGHTS))
  x, y = features_of(TRAIN)
  test, labels = features_of(TEST)
  order = np.random.default_rng(6).permutation(203)
  out, rest = order[:41], order[41:]
  scores = [
    peer_of(standardised(x[rest], x[rest]), y[rest], l2).score(
      standardised(x[out], x[rest]), y[out]
    )
    for l2 in grid
  ]
  best = grid[int(np.argmax(scores))]
  assert best == 1e-2 and len(set(scores)) == 3
  peer = peer_of(standardised(x, x), y, best)
  assert found == {
    'accuracy': peer.score(standardised(test, x), labels),
    'train_accuracy': peer.score(standardised(x, x), y),
    'l2': best,
  }
  assert found['accuracy'] > 0.5


def test_evaluated_labels_do_not_affect_the_choice():
  """With other labels, only the accuracy changes; bad records are left out."""
  grid = (10.0, 0.1, 1e-2)
  train = Colours(203, 1, bad=[3, 50])
  wrong = copy.copy(TEST)
  wrong.given = (TEST.given + 1) % CLASSES
  policy = dict(on_bad_record='skip', max_bad_share=0.1)
  found, other = (
    Evaluator(setting(train, test, **policy), split='test', l2=grid).run(
      jnp.array(WEIGHTS)
    )
    for test in (TEST, wrong)
  )
  assert found['l2'] in grid
  assert other.pop('accuracy') < 0.3 and found.pop('accuracy') > 0.4
  assert found == other
