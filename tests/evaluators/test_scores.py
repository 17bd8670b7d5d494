"""Tests of the scores of labels and numbers against scikit-learn."""

import csv
import io

import numpy as np
import pytest
import scipy.special
from indexed_source import Shown, eval_setting
from sklearn import metrics

from vit_jax.data.augment import targets
from vit_jax.errors import UserError
from vit_jax.evaluators.scores import Evaluator

SIZE, NAMES = 23, ['cat', 'dog', 'emu', 'fox']
BAD = (4, 22)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(SIZE, 4)).astype(np.float32)
HOT = RNG.random((SIZE, 4)) < 0.4
HOT[:, 3] = False  # no fox
LABELS = RNG.integers(0, 3, SIZE)
NUMBERS = RNG.normal(size=(SIZE, 2))


def evaluator(kind, devices=1, batch_size=8, bad=(), loss=None):
  lists = [np.flatnonzero(row).tolist() for row in HOT]
  age, size = NUMBERS.T.tolist()
  source = Shown(LABELS, NAMES, bad, age=age, size=size)
  source.columns['labels'] = lists
  keys = dict(on_bad_record='skip', max_bad_share=0.5) if bad else {}
  setting = eval_setting(
    source, num_classes=4, devices=devices, batch_size=batch_size, **keys
  )
  of_kind = dict(labels=dict(classes=4), numbers=dict(numbers=('age', 'size')))
  if kind in of_kind:
    transform = targets.EvalTransform((4, 4), **of_kind[kind])
    setting = setting._replace(transform=transform)
  if kind == 'numbers':
    source.class_names = ['age', 'size']
  losses = dict(label='softmax', labels='sigmoid', numbers='squared')
  setting.objective.cross_entropy = loss or losses[kind]
  return Evaluator(setting, split='all')


LAYOUTS = [(1, 8, ()), (2, 3, ()), (2, 50, BAD), (1, 5, BAD)]


@pytest.mark.parametrize('devices, batch_size, bad', LAYOUTS)
@pytest.mark.parametrize(
  'kind, loss',
  [('labels', 'sigmoid'), ('label', 'softmax'), ('label', 'sigmoid')],
)
def test_scores_of_classes(devices, batch_size, bad, kind, loss):
  """Padding and bad records do not count; nor do classes without images.

  AUC compares a class with the rest. Of single labels, the most likely class is
  predicted; of several labels, those with a probability of at least 0.5.
  """
  made = evaluator(kind, devices, batch_size, bad, loss)
  found = made.run(LOGITS)
  kept = [i for i in range(SIZE) if i not in bad]
  outputs = scipy.special.expit(LOGITS[kept])
  if loss == 'softmax':
    outputs = scipy.special.softmax(LOGITS[kept], axis=1)
  true, predicted = HOT[kept], outputs >= 0.5
  if kind == 'label':
    true, predicted = np.eye(4)[LABELS[kept]], np.eye(4)[outputs.argmax(1)]
  true, predicted, outputs = (x[:, :3] for x in (true, predicted, outputs))
  ratios = metrics.precision_recall_fscore_support(
    true, predicted, average='macro', zero_division=0
  )
  expected = {
    'mean_average_precision': metrics.average_precision_score(true, outputs),
    **dict(zip(('precision', 'recall', 'f1'), ratios, strict=False)),
    'auc': metrics.roc_auc_score(true, outputs),
    'count': len(kept),
  }
  assert found == pytest.approx(expected, rel=1e-6)
  table = [*csv.DictReader(io.StringIO(made.tables()['classes.csv']))]
  assert [line['name'] for line in table] == NAMES
  f1 = metrics.f1_score(true, predicted, average=None)
  assert [float(line['f1']) for line in table[:3]] == pytest.approx(f1)
  assert table[3]['average_precision'] == 'nan'


@pytest.mark.parametrize('devices, batch_size, bad', LAYOUTS)
def test_numbers(devices, batch_size, bad):
  """The table has a line for each number."""
  made = evaluator('numbers', devices, batch_size, bad)
  found = made.run(LOGITS[:, :2])
  kept = [i for i in range(SIZE) if i not in bad]
  true, predicted = NUMBERS[kept], LOGITS[kept, :2]
  expected = metrics.mean_absolute_error(true, predicted)
  assert found['mean_absolute_error'] == pytest.approx(expected, rel=1e-6)
  assert found['count'] == len(kept)
  table = [*csv.DictReader(io.StringIO(made.tables()['classes.csv']))]
  age, size = np.abs(true - predicted).mean(0)
  rows = {line['name']: float(line['absolute_error']) for line in table}
  assert rows == pytest.approx({'age': age, 'size': size})


def test_undefined_scores_are_left_out(monkeypatch):
  """All images have the same label, so there is no AUC."""
  monkeypatch.setitem(globals(), 'LABELS', np.zeros_like(LABELS))
  found = evaluator('label').run(LOGITS)
  assert 'auc' not in found
  assert found['mean_average_precision'] == pytest.approx(1)


def test_nan_outputs_are_refused():
  logits = LOGITS.copy()
  logits[3, 1] = np.nan
  with pytest.raises(UserError, match='logits of shown/23 are not finite'):
    evaluator('labels').run(logits)
