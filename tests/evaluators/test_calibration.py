"""Tests of accuracies, likelihood and calibration against plain loops."""

import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from indexed_source import Shown, eval_setting

from vit_jax.data import filters
from vit_jax.errors import UserError
from vit_jax.evaluators.calibration import Evaluator, calibration_error

CLASSES, BINS = 9, 7
KNOWN = [1, 2, 4, 7]  # the only labels of the examples


def shown(size, bad=()):
  """Returns images with one label, and with any number of labels."""
  rng = np.random.default_rng(size)
  labels = rng.choice(KNOWN, size)
  several = [
    rng.choice(KNOWN, number, replace=False).tolist()
    for number in rng.integers(0, 4, size)
  ]
  return Shown(labels, 'abcdefghi', bad, several=several)


def table(size):
  """Returns logits with few values, so that many classes are equal."""
  rng = np.random.default_rng(7)
  logits = rng.integers(-2, 3, (size, CLASSES)).astype(np.float32)
  logits[::5] += rng.normal(size=CLASSES).astype(np.float32) * 2
  return logits


def setting(source, devices=1, batch_size=8, **more):
  more.setdefault('num_classes', CLASSES)
  return eval_setting(source, devices=devices, batch_size=batch_size, **more)


def expected_of(source, classes, sets, loss):
  """Computes the expected results; `sets` contains the correct labels."""
  hits, nlls, inside = {1: 0, 2: 0, 5: 0}, [], [[] for _ in range(BINS)]
  used = [i for i in range(len(source)) if sets[i] and i not in source.bad]
  for i in used:
    logits = table(len(source))[i].astype(np.float64)
    order = sorted(classes, key=lambda c: (-logits[c], c))
    for k in hits:
      hits[k] += any(c in sets[i] for c in order[:k])
    best, label = logits[order[0]], logits[sets[i][0]]
    if loss == 'softmax':
      total = math.log(sum(math.exp(logits[c]) for c in classes))
      confidence = math.exp(best - total)
    else:
      total = sum(math.log1p(math.exp(logits[c])) for c in classes)
      confidence = 1 / (1 + math.exp(-best))
    nlls.append(total - label)
    pair = confidence, order[0] in sets[i]
    inside[math.ceil(confidence * BINS) - 1].append(pair)
  gaps = [len(x) * abs(np.subtract(*np.mean(x, axis=0))) for x in inside if x]
  found = {f'top{k}': hits[k] / len(used) for k in hits}
  found |= dict(accuracy=found.pop('top1'), nll=np.mean(nlls))
  return found | dict(ece=sum(gaps) / len(used), count=len(used))


@pytest.mark.parametrize('among', ['all', 'present'])
@pytest.mark.parametrize(
  'labels, loss, size, devices, batch_size',
  [
    ('label', 'softmax', 1, 8, 8),
    ('label', 'softmax', 37, 8, 16),
    ('label', 'softmax', 37, 1, 64),
    ('label', 'sigmoid', 37, 1, 1),
    ('several', 'softmax', 37, 1, 7),
    ('several', 'softmax', 37, 8, 16),
  ],
)
def test_results_equal_a_loop_over_all_examples(
  labels, loss, size, devices, batch_size, among
):
  """They do not depend on the batch size, padding, devices or equal logits.

  Of several labels, any is correct; unlabelled and bad images are left out.
  """
  source = shown(size, bad=(3, 36) if labels == 'several' else ())
  policy = dict(on_bad_record='skip', max_bad_share=0.5)
  made = setting(source, devices, batch_size, **policy)
  made.objective.cross_entropy = loss
  keys = dict(split='test', top=(1, 2, 5), labels=labels, bins=BINS)
  found = Evaluator(made, among=among, **keys).run(table(size))
  sets = source.columns['several']
  if labels == 'label':
    sets = [[int(label)] for label in source.given]
  present = sorted({c for each in sets for c in each})
  classes = range(CLASSES) if among == 'all' else present
  expected = expected_of(source, classes, sets, loss)
  empty = {i for i, each in enumerate(sets) if not each}
  expected['left_out'] = len(empty - source.bad)
  if labels == 'several':
    del expected['nll']
    assert expected['left_out'] > 3
  assert found == pytest.approx(expected, rel=1e-5)
  if size > 1:
    assert 0 < found['accuracy'] < found['top2'] <= found['top5']
    assert found['ece'] > 0.02


def test_infinite_and_nan_logits():
  """NaN is never correct; a class at minus infinity comes last."""
  source = shown(6)
  source.given[:3] = 4, 7, 1  # equal logits are ordered by class number
  logits = np.full((6, CLASSES), -np.inf, np.float32)
  logits[:, 0] = 0
  logits[3:] = np.nan
  evaluator = Evaluator(setting(source), split='test', top=(1, 5))
  found = evaluator.run(jnp.asarray(logits))
  assert found['accuracy'] == 0 and found['top5'] == 2 / 6
  assert math.isnan(found['nll']) and math.isnan(found['ece'])
  evaluator = Evaluator(setting(source), split='test', top=(1, CLASSES))
  logits[3:] = np.eye(6, CLASSES)[3:]  # a single NaN, not of the label
  logits[range(3, 6), source.given[3:] - 1] = np.nan
  assert evaluator.run(jnp.asarray(logits))[f'top{CLASSES}'] == 3 / 6


def test_a_confidence_between_two_bins_belongs_to_the_lower_one():
  """Bin m of M contains ((m - 1) / M, m / M]."""
  confidence, correct = np.array([0.2, 0.1]), np.array([True, False])
  found = calibration_error(confidence, correct, 5)
  assert found == pytest.approx(abs(1 - 0.3) / 2)


def test_several_labels_are_matched_by_class_name():
  """The head has its classes in another order."""
  source = shown(12)
  heads = list('zihgfedcba')
  mapped = filters.matched(source, heads, 'the head')
  plain = Evaluator(setting(source), split='test', labels='several')
  logits = table(12) + np.linspace(0, 1e-3, CLASSES, dtype=np.float32)
  theirs = np.full((12, 10), -np.inf, np.float32)
  theirs[:, [heads.index(name) for name in source.class_names]] = logits
  expected = plain.run(jnp.asarray(logits))
  made = setting(mapped, num_classes=10)
  found = Evaluator(made, split='test', labels='several').run(theirs)
  assert found == pytest.approx(expected, rel=1e-6)
  assert 0 < expected['accuracy'] < 1 and expected['left_out'] > 0
  copied = pickle.loads(pickle.dumps(mapped))
  assert copied[1]['several'] == [9 - c for c in source.columns['several'][1]]


UNLABELLED, TOO_LARGE = [[]] * 9, [[CLASSES]] * 9


@pytest.mark.parametrize(
  'several, classes, keys, words',
  [
    (None, 9, dict(bins=0), 'bins is 0'),
    (None, 9, dict(top=(0,)), 'top is 0'),
    (None, 9, dict(among='some'), 'some.*all, present'),
    (None, 0, {}, 'no head'),
    (None, 5, {}, '9 classes, .*head .*5'),
    (None, 9, dict(labels='real'), 'but not real'),
    (UNLABELLED, 9, dict(labels='several'), 'none of its 9 examples'),
    (
      UNLABELLED,
      9,
      dict(labels='several', among='present'),
      'none of its 9 examples',
    ),
    (TOO_LARGE, 9, dict(labels='several'), r'label \[9\]; allowed: 0 to 8'),
  ],
)
def test_wrong_settings_are_refused(several, classes, keys, words):
  source = shown(9)
  source.columns = {'several': several} if several else source.columns
  with pytest.raises(UserError, match=words):
    made = setting(source, num_classes=classes)
    Evaluator(made, split='test', **keys).run(jnp.asarray(table(9)))
