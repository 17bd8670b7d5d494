"""Tests of mean IoU and of sliding windows against other implementations."""

import csv
import io
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from indexed_source import mesh_of
from masked_source import Masked
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score

from tests import sliding_windows
from vit_jax.data.augment import segments, windows
from vit_jax.data.pipeline.workers import Reader
from vit_jax.errors import UserError
from vit_jax.evaluators import miou
from vit_jax.evaluators.contract import Setting

CLASSES, CELLS = 5, 4  # cells of a window along each axis
SIZES = [(40, 64), (33, 32), (90, 37), (32, 32), (50, 41), (71, 100), (32, 96)]


def cells_of(images):
  """Returns random functions of the means of 4x4 cells of each image."""
  n, height, width, c = images.shape
  x = images.reshape(n, CELLS, height // CELLS, CELLS, width // CELLS, c)
  x = x.astype(np.float32).mean((2, 4)) / 30
  kernel = np.random.default_rng(3).normal(size=(3, CLASSES))
  # Class 3 is never predicted.
  bias = np.array([0, 0, 0, -1e3, 0], np.float32)
  return (np if isinstance(x, np.ndarray) else jnp).sin(
    x @ kernel.astype(np.float32) * 5
  ) + bias


def setting(source, transform, batch_size=4, devices=1, function=cells_of):
  predict = lambda weights, batch, want: {'classes': function(batch['image'])}  # noqa: E731
  objective = types.SimpleNamespace(
    predict=predict, results=('classes',), classes=CLASSES
  )
  return Setting(
    open_source=lambda split: source,
    transform=transform,
    objective=objective,  # pyright: ignore[reportArgumentType]
    mesh=mesh_of(data=devices),
    batch_size=batch_size,
    reader=Reader(threads=2),
  )


def reference_metrics(true, predicted):
  """Computes the metrics by scikit-learn from lists of pixels."""
  both = np.union1d(true, predicted)
  matrix = dict(labels=both, average=None, zero_division=0)
  present = np.unique(true)
  return {
    'miou': jaccard_score(true, predicted, **matrix).mean(),
    'accuracy': (true == predicted).mean(),
    'mean_accuracy': recall_score(
      true, predicted, labels=present, average=None
    ).mean(),
  }


@pytest.mark.parametrize('batch_size, devices', [(3, 1), (8, 4)])
def test_windows_equal_a_loop_over_them(batch_size, devices):
  """Original label sizes; ignored pixels, an absent class and padding."""
  source = Masked(SIZES, classes=3)
  true, predicted = [], []
  for index in range(len(source)):
    mask = source.mask(index)
    found = sliding_windows.predicted_classes(cells_of, source[index]['image'])
    true.append(mask[mask != 255])
    predicted.append(found[mask != 255])
  true, predicted = np.concatenate(true), np.concatenate(predicted)
  keys = dict(classes=CLASSES, label_size=100, windows=5)
  transform = windows.EvalTransform((32, 32), **keys)
  made = setting(source, transform, batch_size, devices)
  evaluator = miou.Evaluator(made, split='test')
  found = evaluator.run({})
  pairs = confusion_matrix(true, predicted, labels=range(CLASSES))
  assert np.abs(evaluator._pairs - pairs).sum() <= 4  # of 21,000: rounding
  expected = reference_metrics(true, predicted)
  assert {k: found[k] for k in expected} == pytest.approx(expected, abs=2e-4)
  assert (found['classes'], found['pixels']) == (3, len(true))
  assert {3, 4} & {*np.unique(true)} == set() and 4 in predicted
  tables = evaluator.tables()
  lines = list(csv.DictReader(io.StringIO(tables['classes.csv'])))
  assert [int(line['pixels']) for line in lines] == pairs.sum(1).tolist()
  assert lines[3]['iou'] == lines[4]['accuracy'] == ''
  assert float(lines[4]['iou']) == 0  # predicted, but in no mask
  rows = list(csv.reader(io.StringIO(tables['pairs.csv'])))[1:]
  table = np.array(rows, int)[:, 1:]
  np.testing.assert_array_equal(table, evaluator._pairs)


def test_without_windows_scores_are_interpolated_to_the_image():
  source = Masked(SIZES, classes=CLASSES)
  transform = segments.EvalTransform((48, 40), classes=CLASSES, resize='squash')
  found = miou.Evaluator(setting(source, transform, 3), split='test').run({})
  true, predicted = [], []
  for index in range(len(source)):
    batch = transform(source[index])
    cells = torch.tensor(cells_of(batch['image'][None])).movedim(-1, 1)
    scores = F.interpolate(cells, (48, 40), mode='bilinear')[0]
    used = batch['segments'] != -1
    true.append(batch['segments'][used])
    predicted.append(scores.argmax(0).numpy()[used])
  expected = reference_metrics(np.concatenate(true), np.concatenate(predicted))
  assert {k: found[k] for k in expected} == pytest.approx(expected, abs=2e-4)


def plain(height, width, classes=CLASSES):
  return segments.EvalTransform((height, width), classes=classes)


FEW = windows.EvalTransform((32, 32), windows=2, label_size=64, classes=CLASSES)


@pytest.mark.parametrize(
  'size, transform, scale, words',
  [
    (SIZES[0], plain(48, 40), np.nan, 'not finite'),
    (SIZES[0], plain(48, 40, classes=7), 1, '7.*5'),
    (SIZES[0], plain(48, 42), None, '42.*patch'),
    ((30, 90), FEW, 1, '30 x 90.*windows=5.*label_size=90'),
  ],
)
def test_wrong_scores_and_sizes_are_refused(size, transform, scale, words):
  function = lambda x: cells_of(x) * scale  # noqa: E731
  if scale is None:
    function = lambda x: jnp.zeros((len(x), CELLS, CELLS, CLASSES))  # noqa: E731
  made = setting(Masked([size], CLASSES), transform, function=function)
  with pytest.raises(UserError, match=words):
    miou.Evaluator(made, split='test').run({})
