"""Tests of the accuracy of each class and the confusion matrix."""

import csv
import io

import numpy as np
import pytest
from indexed_source import Shown, eval_setting
from sklearn.metrics import confusion_matrix, recall_score

from vit_jax.errors import UserError
from vit_jax.evaluators import confusion
from vit_jax.evaluators.confusion import Evaluator

NAMES = ['cat', 'dog', 'emu', 'fox']
LABELS = [0, 0, 0, 0, 0, 0, 1, 1, 3, 3, 3]  # no emu
PREDICTIONS = [0, 0, 0, 0, 1, 2, 1, 0, 3, 2, 2]
BAD = 4


def evaluator(bad=(), num_classes=4, **keys):
  policy = dict(on_bad_record='skip', max_bad_share=0.5) if bad else {}
  source = Shown(LABELS, NAMES, bad)
  setting = eval_setting(source, num_classes=num_classes, **policy, **keys)
  return Evaluator(setting, split='all')


def table(text):
  return list(csv.DictReader(io.StringIO(text)))


LOGITS = np.eye(4, dtype=np.float32)[PREDICTIONS]


@pytest.mark.parametrize(
  'devices, batch_size, bad',
  [(1, 3, ()), (2, 4, ()), (1, 50, (BAD,)), (2, 3, (BAD,))],
)
def test_matrix_and_mean_over_classes(devices, batch_size, bad):
  """Padding and bad records do not count; classes have equal weights."""
  made = evaluator(bad, devices=devices, batch_size=batch_size)
  labels, predicted = (np.delete(x, bad) for x in (LABELS, PREDICTIONS))
  recall = recall_score(labels, predicted, labels=[0, 1, 3], average=None)
  assert made.run(LOGITS) == pytest.approx(
    {
      'accuracy': (labels == predicted).mean(),
      'mean_class_accuracy': recall.mean(),
      'classes': 3,
      'count': len(labels),
    }
  )
  tables = made.tables()
  cat, dog, emu, fox = table(tables['classes.csv'])
  assert [line['class'] for line in (cat, dog, emu, fox)] == NAMES
  assert (emu['images'], emu['accuracy']) == ('0', '')
  found = [float(line['accuracy']) for line in (cat, dog, fox)]
  assert found == pytest.approx(recall, abs=1e-6)
  pairs = confusion_matrix(labels, predicted, labels=range(4))
  for line in table(tables['pairs.csv']):
    index = NAMES.index(line['label']), NAMES.index(line['prediction'])
    assert int(line['images']) == pairs[index] > 0
    pairs[index] = 0
  assert not pairs.any()


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
