"""Tests of linear probes against scikit-learn and plain loops."""

import copy
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from indexed_source import mesh_of
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

from vit_jax.errors import UserError
from vit_jax.evaluators import linear_descent, linear_fit
from vit_jax.evaluators.features import Labelled
from vit_jax.evaluators.linear_descent import Recipe
from vit_jax.evaluators.linear_probe import Evaluator


def peer_of(x, y, l2):
  """Returns scikit-learn's regression with the equivalent regularization."""
  exact = dict(solver='newton-cholesky', tol=1e-10, max_iter=1000)
  return LogisticRegression(C=1 / (len(y) * l2), **exact).fit(x, y)


def standardised(x, by):
  x, by = x.astype(np.float64), by.astype(np.float64)
  return (x - by.mean(0)) / (by.std(0) + 1e-5)


@pytest.mark.parametrize('standardise', [True, False])
@pytest.mark.parametrize('size, l2', [(203, 1e-3), (203, 0.1), (9, 1e-2)])
def test_regression_equals_scikit_learn(size, l2, standardise, monkeypatch):
  """Coefficients (about 5) agree to 5e-5; several blocks are used."""
  monkeypatch.setattr(linear_fit, '_BLOCK', 64)
  x, y = features_of(TRAIN, slice(size))
  test, labels = features_of(TEST)
  found = linear_fit.fit(Labelled(x, y), l2, standardise)
  theirs, test_features = x.astype(np.float64), test.astype(np.float64)
  if standardise:
    theirs, test_features = standardised(x, x), standardised(test, x)
  peer = peer_of(theirs, y, l2)
  np.testing.assert_array_equal(found.classes, peer.classes_)
  np.testing.assert_allclose(found.kernel, peer.coef_.T, rtol=0, atol=5e-5)
  bias = (
    peer.intercept_ - peer.intercept_.mean()
  )  # the constant is not penalized
  np.testing.assert_allclose(
    found.bias - found.bias.mean(), bias, rtol=0, atol=5e-5
  )
  answers = peer.predict(test_features)
  assert found.accuracy(Labelled(test, answers)) == 1
  assert found.accuracy(Labelled(test, labels)) == (answers == labels).mean()
  assert len(set(answers.tolist())) > 2 and np.abs(found.kernel).max() > 0.05


def test_correlated_features_converge_in_50_steps(monkeypatch, caplog):
  """The spectrum spans five decades; plain L-BFGS takes 2,400 steps."""
  monkeypatch.setattr(linear_fit, '_ITERATIONS', 50)
  rng = np.random.default_rng(0)
  mixed = np.linalg.qr(rng.normal(size=(24, 24)))[0]
  z = rng.normal(size=(600, 24))
  x = ((z * np.logspace(0, -5, 24)) @ mixed).astype(np.float32)
  scores = z @ rng.normal(size=(24, 4)) + 2 * rng.gumbel(size=(600, 4))
  y = scores.argmax(axis=1).astype(np.int32)
  found = linear_fit.fit(Labelled(x, y), 1e-5)
  peer = peer_of(standardised(x, x), y, 1e-5)
  np.testing.assert_allclose(found.kernel, peer.coef_.T, rtol=0, atol=1e-5)
  assert np.abs(peer.coef_).max() > 10 and not caplog.text


def test_classes_without_examples_are_never_predicted():
  """They do not prevent convergence."""
  x, y = features_of(TRAIN)
  kept = np.isin(y, [1, 4, 3])
  found = linear_fit.fit(Labelled(x[kept], y[kept]), 1e-3)
  assert found.classes.tolist() == [1, 3, 4]
  assert found.kernel.shape == (12, 3)
  right = found.accuracy(Labelled(x, y))
  assert right == found.accuracy(Labelled(x[kept], y[kept])) * kept.mean()


def test_a_fit_that_does_not_converge_is_logged(monkeypatch, caplog):
  monkeypatch.setattr(linear_fit, '_ITERATIONS', 3)
  monkeypatch.setattr(linear_fit, '_STEPS', 3)
  linear_fit.fit(Labelled(*features_of(TRAIN)), 1e-5)
  assert 'l2=1e-05 did not converge' in caplog.text


def loop(recipe, x, y, classes):
  """Runs a recipe in float64, one example at a time."""
  x = x.astype(np.float64)
  if recipe.norm == 'standard':
    x = standardised(x, x)
  first = linear_descent.initial(x.shape[1], classes, recipe.seed)
  kernel, bias = (first[k].astype(np.float64) for k in ('kernel', 'bias'))
  velocity = [np.zeros_like(kernel), np.zeros_like(bias)]
  mean, variance = np.zeros(x.shape[1]), np.ones(x.shape[1])
  size = min(recipe.batch_size, len(y))
  steps = len(y) // size
  for number in range(recipe.epochs):
    order = linear_descent.order_of(len(y), number, recipe.seed)
    for step in range(steps):
      rows = order[step * size : (step + 1) * size]
      batch = x[rows]
      if recipe.norm == 'batch':
        middle, spread = batch.mean(0), batch.var(0)
        mean = 0.9 * mean + 0.1 * middle
        variance = 0.9 * variance + 0.1 * batch.var(0, ddof=1)
        batch = (batch - middle) / np.sqrt(spread + 1e-6)
      gradient, at_bias = np.zeros_like(kernel), np.zeros_like(bias)
      for row, label in zip(batch, y[rows], strict=True):
        odds = np.exp(row @ kernel + bias)
        error = odds / odds.sum() - np.eye(classes)[label]
        gradient += np.outer(row, error) / size
        at_bias += error / size
      time, warmup = number + step / steps, min(10, recipe.epochs / 2)
      if recipe.solver == 'sgd':
        share = (1 + math.cos(math.pi * number / recipe.epochs)) / 2
      elif time < warmup:
        share = time / warmup
      else:
        left = (time - warmup) / (recipe.epochs - warmup)
        share = (1 + math.cos(math.pi * left)) / 2
      if recipe.solver == 'lars':
        gradient *= 1e-3 * math.sqrt((kernel**2).sum() / (gradient**2).sum())
      velocity[0] = 0.9 * velocity[0] + gradient
      velocity[1] = 0.9 * velocity[1] + at_bias
      kernel -= recipe.lr * size / 256 * share * velocity[0]
      bias -= recipe.lr * size / 256 * share * velocity[1]
  return kernel, bias, mean, variance


@pytest.mark.parametrize(
  'solver, norm, lr, epochs, batch_size',
  [
    ('sgd', 'none', 2.0, 2, 48),
    ('sgd', 'standard', 0.5, 3, 1000),
    ('lars', 'batch', 3.0, 4, 64),
    ('lars', 'batch', 2.0, 21, 203),
    ('lars', 'none', 3.0, 3, 64),
  ],
)
def test_descents_equal_the_loops(solver, norm, lr, epochs, batch_size):
  """Parameters and running statistics agree up to rounding in float32."""
  x, y = features_of(TRAIN)
  recipe = Recipe(solver, norm, lr, epochs, batch_size, seed=3)
  found = linear_descent.fit(Labelled(x, y), recipe, mesh_of())
  kernel, bias, mean, variance = loop(recipe, x, y, CLASSES)
  first = linear_descent.initial(12, CLASSES, 3)
  moved = np.abs(kernel - first['kernel']).max()
  assert moved > 1e-4 and np.abs(bias).max() > 0.01
  close = dict(rtol=1e-4, atol=1e-3 * moved)
  np.testing.assert_allclose(found.kernel, kernel, **close)
  np.testing.assert_allclose(found.bias, bias, **close)
  if norm == 'batch':
    np.testing.assert_allclose(found.mean, mean, **close)
    np.testing.assert_allclose(found.scale**2, variance + 1e-6, **close)
  elif norm == 'none':
    assert not found.mean.any() and (found.scale == 1).all()


def test_descents_depend_on_the_seed_but_not_on_devices():
  data = Labelled(*features_of(TRAIN))
  recipe = Recipe('lars', 'batch', 1.0, 2, 64, seed=0)
  one, eight, again = (
    linear_descent.fit(data, recipe, mesh_of(data=n)) for n in (1, 8, 8)
  )
  other = linear_descent.fit(data, recipe._replace(seed=1), mesh_of())
  np.testing.assert_array_equal(eight.kernel, again.kernel)
  np.testing.assert_allclose(eight.kernel, one.kernel, rtol=1e-5, atol=1e-8)
  assert np.abs(other.kernel - one.kernel).max() > 1e-3
  orders = [linear_descent.order_of(99, *of) for of in ((0, 0), (1, 0), (0, 1))]
  assert len({tuple(order) for order in orders}) == 3
  assert all(sorted(order) == list(range(99)) for order in orders)


def test_trust_ratio():
  """It is a thousandth of the ratio of the norms, and 1 if one of them is 0."""
  rng = np.random.default_rng(0)
  kernel, gradient = jnp.asarray(rng.normal(size=(2, 7, 3)), jnp.float32)
  expected = 0.001 * np.sqrt((kernel**2).sum()) / np.sqrt((gradient**2).sum())
  optimizer = linear_descent.optimizer_of('lars')

  def update_of(kernel, gradient):
    params = {'kernel': kernel, 'bias': kernel}
    gradients = {'kernel': gradient, 'bias': gradient}
    return optimizer.update(gradients, optimizer.init(params), params)[0]

  found = update_of(kernel, gradient)
  close = dict(rtol=1e-6, atol=0)
  np.testing.assert_allclose(found['kernel'], expected * gradient, **close)
  np.testing.assert_array_equal(found['bias'], gradient)
  found = update_of(0 * kernel, gradient)
  np.testing.assert_array_equal(found['kernel'], gradient)
  assert not update_of(kernel, 0 * gradient)['kernel'].any()


def test_batch_norm_equals_torch():
  """There is no scale and shift: three batches, then the running statistics."""
  peer = torch.nn.BatchNorm1d(12, affine=False, eps=1e-6)
  state = linear_descent.Statistics(jnp.zeros(12), jnp.ones(12))
  x, _ = features_of(TRAIN)
  x[:, 3] *= 1e-3  # so small that epsilon matters
  for rows in (slice(64), slice(64, 128), slice(5, 9)):
    found, state = linear_descent.normalized(jnp.asarray(x[rows]), state)
    expected = peer(torch.tensor(x[rows])).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  close = dict(rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(state.mean, peer.running_mean, **close)
  np.testing.assert_allclose(state.variance, peer.running_var, **close)


@pytest.mark.parametrize('devices, batch_size', [(1, 16), (1, 7), (4, 24)])
def test_probe_chooses_on_held_out_examples(devices, batch_size):
  """It then fits on all examples; the reference is scikit-learn."""
  grid = (0.3, 1e-2, 1e-3)  # the last is best on its training data
  evaluator = Evaluator(
    setting(devices=devices, batch_size=batch_size),
    split='test',
    l2=grid,
    held_out=0.2,
    seed=6,
  )
  found = evaluator.run(jnp.array(WEIGHTS))
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


@pytest.mark.parametrize('grid', [(0.01, 0.010001), (0.010001, 0.01)])
def test_the_first_of_equally_good_values_is_chosen(grid):
  """The values are so close that they give the same predictions."""
  evaluator = Evaluator(setting(), split='test', l2=grid, held_out=0.2)
  data = Labelled(*features_of(TRAIN))
  kept = np.random.default_rng(0).permutation(203)
  fitted = Labelled(data.features[kept[41:]], data.labels[kept[41:]])
  held_out = Labelled(data.features[kept[:41]], data.labels[kept[:41]])
  scores = {linear_fit.fit(fitted, l2).accuracy(held_out) for l2 in grid}
  assert len(scores) == 1
  assert evaluator.run(jnp.array(WEIGHTS))['l2'] == grid[0]


def test_the_lowest_of_equally_likely_classes_is_predicted():
  """Classes 2 and 5 have equal scores for every example, above class 7."""
  kernel, bias = np.zeros((3, 3)), np.array([1.0, 1.0, 0.0])
  classes = np.array([2, 5, 7])
  fitted = linear_fit.Classifier(np.zeros(3), np.ones(3), kernel, bias, classes)
  features = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  labels = np.array([2, 5, 2, 7], np.int32)
  assert fitted.accuracy(Labelled(features, labels)) == 0.5
  labels = np.array([5, 5, 5, 2], np.int32)
  assert fitted.accuracy(Labelled(features, labels)) == 0.25


@pytest.mark.parametrize(
  'more, key',
  [
    (dict(l2=(10.0, 0.1, 1e-2)), 'l2'),
    (dict(solver='sgd', lr=(1e-4, 5.0), epochs=5, probe_batch_size=50), 'lr'),
    (
      dict(solver='lars', lr=(1e-3, 20.0), epochs=30, probe_batch_size=30),
      'lr',
    ),
  ],
)
def test_evaluated_labels_do_not_affect_the_choice(more, key):
  """With other labels, only the accuracy changes; bad records are left out."""
  train = Colours(203, 1, bad=[3, 50])
  wrong = copy.copy(TEST)
  wrong.labels = (TEST.labels + 1) % CLASSES
  policy = dict(on_bad_record='skip', max_bad_share=0.1)
  found, other = (
    Evaluator(setting(train, test, **policy), split='test', **more).run(
      jnp.array(WEIGHTS)
    )
    for test in (TEST, wrong)
  )
  assert found[key] in more[key]
  assert other.pop('accuracy') < 0.3 and found.pop('accuracy') > 0.4
  assert found == other
  if key == 'lr':
    assert found['lr'] == more['lr'][1]


def test_default_recipes():
  """They are those of the papers and their code."""
  sgd = Evaluator(setting(), split='test', solver='sgd')
  lars = Evaluator(setting(), split='test', solver='lars')
  assert sgd._recipe == Recipe('sgd', 'none', 0.0, 100, 1024, 0)
  assert lars._recipe == Recipe('lars', 'batch', 0.0, 90, 16_384, 0)
  assert (sgd._grid, lars._grid) == ((0.001,), (0.1,))
  recipe = lars._recipe._replace(lr=0.1)
  rates = [
    linear_descent.learning_rates(recipe, n, 78, 16_384) for n in range(90)
  ]
  assert rates[0][0] == 0 and rates[10][0] == pytest.approx(6.4)
  assert rates[5][0] == rates[50][0] == pytest.approx(3.2)
  assert rates[89][-1] < 6e-3


def test_messages_of_wrong_settings():
  wrong = {
    "solver is 'adam'.*lbfgs": dict(solver='adam'),
    'allowed with lbfgs: standard, none': dict(norm='batch'),
    'l2 is empty': dict(l2=()),
    'l2 is 0.0': dict(l2=(0.0,)),
    'lr is -1.0': dict(solver='sgd', lr=(-1.0,)),
    'epochs is 0': dict(solver='sgd', epochs=0),
    'held_out is 1.0': dict(held_out=1.0),
  }
  for message, more in wrong.items():
    with pytest.raises(UserError, match=message):
      Evaluator(setting(), split='test', **more)
  evaluator = Evaluator(setting(), split='test', held_out=1e-3)
  with pytest.raises(UserError, match='203 usable examples, .*held_out'):
    evaluator.run(jnp.array(WEIGHTS))
