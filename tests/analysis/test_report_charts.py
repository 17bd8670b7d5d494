"""Tests of the pictures and charts of an HTML report."""

import base64
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

from vit_jax.analysis.plotting import COLOURS
from vit_jax.analysis.report import page, record


@pytest.mark.parametrize(
  ('side', 'kind', 'error'), [(20, 'png', 0), (400, 'jpeg', 6)]
)
def test_pictures_keep_their_colours(side, kind, error):
  pixels = np.zeros((side, side, 3), np.uint8)
  pixels[:] = 200, 100, 20
  src = record.picture(pixels, ['x'])['src']
  head, _, data = src.partition(',')
  assert head == f'data:image/{kind};base64'
  array = np.frombuffer(base64.b64decode(data), np.uint8)
  decoded = cv2.imdecode(array, cv2.IMREAD_COLOR_RGB)
  assert max(decoded.shape) == min(side, 160)
  assert np.abs(decoded.astype(int) - [200, 100, 20]).max() <= error


def test_a_chart_has_a_line_and_a_name_per_series():
  """The image is a complete SVG, in which every line has its colour."""
  chart = page.draw_chart('a', {'x': ([0, 5], [1.0, 3.0]), 'y': ([5], [2.0])})
  assert chart is not None
  assert chart.lines == [('x', COLOURS[0]), ('y', COLOURS[1])]
  svg = base64.b64decode(chart.src.partition('base64,')[2]).decode()
  ElementTree.fromstring(svg)
  for colour in COLOURS[:2]:
    assert f'stroke: {colour.lower()}' in svg
  assert f'stroke: {COLOURS[2].lower()}' not in svg


def test_a_series_of_nan_gives_no_chart():
  assert page.draw_chart('x', {'a': ([1, 2], [float('nan')] * 2)}) is None
