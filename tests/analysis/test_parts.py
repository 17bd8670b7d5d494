"""Predictions for the page, and what is confused."""

import base64

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from vit_jax.analysis.report import chart, parts
from vit_jax.arrays import sharding
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.data.pipeline.stream import Reader
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Setting


class Colours:
  """Images whose red tells the class, but for every tenth, which lies."""

  name, num_classes, class_names = 'colours', 3, ['dark', 'middle', 'bright']

  def __len__(self):
    return 50

  def __getitem__(self, index):
    red = 100 * (index % 3)
    if index % 10 == 4:
      red = (red + 100) % 300
    image = np.full((8, 8, 3), (red, index, 0), np.uint8)
    return {'image': image, 'label': index % 3}

  def where(self, index):
    return f'folder/<{index}>.png'


def by_red(params, batch):
  red = batch['image'][:, 0, 0, 0].astype(jnp.float32)
  green = batch['image'][:, 0, 0, 1].astype(jnp.float32)
  # Surer with every example.
  nearest = jnp.abs(red[:, None] - jnp.array([0.0, 100, 200]))
  return {'logits': params * (nearest < 50) * (1 + green[:, None] / 10)}


@pytest.fixture
def setting():
  return Setting(
    open_source=lambda split: Colours(),
    transform=EvalTransform((8, 8)),
    predict=by_red,
    num_classes=3,
    mesh=sharding.make_mesh(jax.devices()[:2]),
    batch_size=16,
    reader=Reader(),
  )


def test_predictions_and_the_surest_mistakes_first(setting):
  found = parts.judge(setting, jnp.float32(1), 'test')
  assert (found['count'], found['total']) == (50, 50)
  assert found['accuracy'] == pytest.approx(0.9)
  wrong = [4, 14, 24, 34, 44]
  titles = [entry['caption'][2] for entry in found['mistakes']]
  assert titles == [f'<{index}>.png' for index in reversed(wrong)]
  first = found['mistakes'][0]['caption']
  assert first[0].startswith('dark') and first[1] == 'is bright'  # 44: 200 → 0
  assert found['examples'][0]['caption'][1:] == ['right', '<0>.png']


def test_examples_of_a_large_split_are_spread_over_it(setting):
  found = parts.judge(setting, jnp.float32(1), 'test', count=5)
  titles = [entry['caption'][2] for entry in found['examples']]
  assert titles == ['<0>.png', '<12>.png', '<24>.png', '<37>.png', '<49>.png']
  assert (found['count'], found['total']) == (5, 50)


def test_examples_of_large_files_have_their_number():
  source = Colours()
  for where in ('test.array_record-00000, record 7', 'a.tar @ 512', ''):
    source.where = lambda index, where=where: where
    assert parts.Spread(source, 5).title(1) == 'example 12'


def test_a_model_without_a_head(setting):
  with pytest.raises(UserError, match='no head'):
    parts.judge(setting._replace(num_classes=0), jnp.float32(1), 'test')


def test_confusion_is_that_of_scikit_learn():
  rng = np.random.default_rng(0)
  labels, predicted = rng.integers(0, 6, (2, 200))
  found = parts.confusion(labels, predicted, list('abcdef'))
  expected = confusion_matrix(labels, predicted)
  assert found['matrix'] == expected.tolist()
  wrong = expected - np.diag(np.diag(expected))
  counts = [row[2] for row in found['confused']]
  assert counts == sorted(wrong[wrong > 0].tolist(), reverse=True)[:20]
  true, taken, count, share = found['confused'][0]
  row = expected['abcdef'.index(true)]
  assert row['abcdef'.index(taken)] == count
  assert share == f'{100 * count / row.sum():.1f} %'


def test_many_classes_have_tables_alone():
  """Class 7 is always wrong, class 5 half of the time."""
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


def test_ticks_are_round():
  assert chart.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
  assert chart.ticks(-3, 11) == [0, 5, 10]
  assert [chart.tick(v) for v in (0.001, 250, 20_000, 3_500_000)] == [
    *('0.001', '250', '20k', '3.5M'),
  ]


def test_places_of_points():
  """The first and last point lie in the corners of the axes."""
  drawing = chart.lines('x', {'a': ([0, 5, 10], [1.0, 3.0, 2.0])})
  (points,) = [p for p in drawing.split('"') if p.count(',') == 3]
  places = [tuple(map(float, p.split(','))) for p in points.split()]
  assert places == [(58, 214), (244, 26), (430, 120)]


def test_nothing_but_nan_is_no_chart():
  assert chart.lines('x', {'a': ([1, 2], [float('nan')] * 2)}) == ''
