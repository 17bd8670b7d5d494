"""Tests of the pictures and the confusion matrix of an HTML report."""

import base64
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from vit_jax.analysis.report import chart, parts
from vit_jax.analysis.style import COLOURS


def test_confusion_equals_scikit_learn():
  rng = np.random.default_rng(0)
  labels, predicted = rng.integers(0, 6, (2, 200))
  found = parts.confusion(labels, predicted, list('abcdef'))
  expected = confusion_matrix(labels, predicted)
  assert found['matrix'] == expected.tolist()
  wrong = expected - np.diag(np.diag(expected))
  counts = [row[2] for row in found['confused']]
  assert counts == sorted(wrong[wrong > 0].tolist(), reverse=True)[:20]
  true, guessed, count, fraction = found['confused'][0]
  row = expected['abcdef'.index(true)]
  assert row['abcdef'.index(guessed)] == count
  assert fraction == f'{100 * count / row.sum():.1f} %'


def test_many_classes_give_tables_and_no_matrix():
  """Predictions of class 7 are always wrong, of class 5 half of the time."""
  labels = np.array([5, 5, 7, 7, 7, 39])
  predicted = np.array([5, 6, 8, 8, 9, 39])
  found = parts.confusion(labels, predicted, [])
  assert found['matrix'] == found['names'] == []
  assert found['confused'][0] == ['class 7', 'class 8', 2, '66.7 %']
  assert found['worst'] == [
    ['class 7', '0.0 %', 3],
    ['class 5', '50.0 %', 2],
    ['class 39', '100.0 %', 1],
  ]


@pytest.mark.parametrize(
  ('side', 'kind', 'error'), [(20, 'png', 0), (400, 'jpeg', 6)]
)
def test_pictures_keep_their_colours(side, kind, error):
  pixels = np.zeros((side, side, 3), np.uint8)
  pixels[:] = 200, 100, 20
  src = parts.picture(pixels, ['x'])['src']
  head, _, data = src.partition(',')
  assert head == f'data:image/{kind};base64'
  array = np.frombuffer(base64.b64decode(data), np.uint8)
  decoded = cv2.imdecode(array, cv2.IMREAD_COLOR_RGB)
  assert max(decoded.shape) == min(side, 160)
  assert np.abs(decoded.astype(int) - [200, 100, 20]).max() <= error


def test_a_chart_has_a_line_and_a_name_per_series():
  """The image is a complete SVG, in which every line has its colour."""
  drawn = chart.lines('a & b', {'x': ([0, 5], [1.0, 3.0]), 'y': ([5], [2.0])})
  assert drawn is not None
  assert [''.join(each.itertext()) for each in drawn] == ['a & b', '', 'xy']
  data = drawn[1].get('src').partition('base64,')[2]
  svg = base64.b64decode(data).decode()
  ElementTree.fromstring(svg)
  for colour in COLOURS[:2]:
    assert f'stroke: {colour.lower()}' in svg
  assert f'stroke: {COLOURS[2].lower()}' not in svg


def test_a_series_of_nan_gives_no_chart():
  assert chart.lines('x', {'a': ([1, 2], [float('nan')] * 2)}) is None
