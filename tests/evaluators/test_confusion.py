"""Tests of the accuracy of each class and the confusion matrix."""

import collections
import csv
import io

import numpy as np
import pytest
from indexed_source import Shown, eval_setting
from sklearn.metrics import confusion_matrix

from vit_jax.errors import UserError
from vit_jax.evaluators import confusion
from vit_jax.evaluators.confusion import Evaluator

NAMES = ['cat', 'dog', 'emu', 'fox']
LABELS = [0, 0, 0, 0, 0, 0, 1, 1, 3, 3, 3]  # no emu
PREDICTIONS = [0, 0, 0, 0, 1, 2, 1, 0, 3, 2, 2]
BAD = 4


def evaluator(bad=(), num_classes=4, **keys):
  policy = 'skip' if bad else 'error'
  setting = eval_setting(
    Shown(LABELS, NAMES, bad),
    num_classes=num_classes,
    on_bad_record=policy,
    max_bad_share=0.5,
    **keys,
  )
  return Evaluator(setting, split='all')


def table(text):
  return list(csv.DictReader(io.StringIO(text)))


LOGITS = np.eye(4, dtype=np.float32)[PREDICTIONS]


@pytest.mark.parametrize('devices', [1, 2])
@pytest.mark.parametrize('batch_size', [3, 4, 50])
@pytest.mark.parametrize('bad', [(), (BAD,)])
def test_matrix_and_mean_over_classes(devices, batch_size, bad):
  """Padding and bad records do not count; classes have equal weights."""
  made = evaluator(bad, devices=devices, batch_size=batch_size)
  scores = made.run(LOGITS)
  pairs = [
    pair
    for i, pair in enumerate(zip(LABELS, PREDICTIONS, strict=True))
    if i not in bad
  ]
  right = {
    label: [a == b for a, b in pairs if a == label] for label in (0, 1, 3)
  }
  assert scores['accuracy'] == pytest.approx(
    np.mean([a == b for a, b in pairs])
  )
  means = [np.mean(each) for each in right.values()]
  assert scores['mean_class_accuracy'] == pytest.approx(np.mean(means))
  assert (scores['classes'], scores['count']) == (3, len(pairs))
  tables = made.tables()
  for label, line in enumerate(table(tables['classes.csv'])):
    assert line['class'] == NAMES[label]
    assert int(line['images']) == len(right.get(label, ()))
    if label in right:
      expected = np.mean(right[label])
      assert float(line['accuracy']) == pytest.approx(expected, abs=1e-6)
    else:
      assert line['accuracy'] == ''
  found = {
    (line['label'], line['prediction']): int(line['images'])
    for line in table(tables['pairs.csv'])
  }
  expected = collections.Counter((NAMES[a], NAMES[b]) for a, b in pairs)
  assert found == expected


def test_nan_logits_are_refused():
  """The class of a NaN would be predicted."""
  logits = LOGITS.copy()
  logits[2, 0] = np.nan
  with pytest.raises(UserError, match='logits of shown.* not finite'):
    evaluator().run(logits)


def test_a_model_without_a_head_is_refused():
  with pytest.raises(UserError, match='num_classes is 0'):
    evaluator(num_classes=0)


def test_confusion_equals_scikit_learn():
  rng = np.random.default_rng(0)
  labels, predicted = rng.integers(0, 6, (2, 200))
  result = confusion.summary(labels, predicted, list('abcdef'))
  expected = confusion_matrix(labels, predicted)
  assert result['matrix'] == expected.tolist()
  wrong = expected - np.diag(np.diag(expected))
  counts = [row[2] for row in result['confused']]
  assert counts == sorted(wrong[wrong > 0].tolist(), reverse=True)[:20]
  true, guessed, count, fraction = result['confused'][0]
  row = expected['abcdef'.index(true)]
  assert row['abcdef'.index(guessed)] == count
  assert fraction == f'{100 * count / row.sum():.1f} %'


def test_many_classes_give_tables_and_no_matrix():
  """Predictions of class 7 are always wrong, of class 5 half of the time."""
  labels = np.array([5, 5, 7, 7, 7, 39])
  predicted = np.array([5, 6, 8, 8, 9, 39])
  result = confusion.summary(labels, predicted, [])
  assert result['matrix'] == result['names'] == []
  assert result['confused'][0] == ['class 7', 'class 8', 2, '66.7 %']
  assert result['worst'] == [
    ['class 7', '0.0 %', 3],
    ['class 5', '50.0 %', 2],
    ['class 39', '100.0 %', 1],
  ]
