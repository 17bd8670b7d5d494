"""Tests of the predictions in the HTML report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed_source import Computed

from vit_jax.arrays import sharding
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.data.contract import Source
from vit_jax.data.pipeline.stream import Reader
from vit_jax.evaluators import features
from vit_jax.evaluators.contract import Setting
from vit_jax.training import reporting


class Colours(Source):
  """Images whose red gives the class, except for every tenth image."""

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
  # The confidence increases with every example.
  nearest = jnp.abs(red[:, None] - jnp.array([0.0, 100, 200]))
  return {'logits': params * (nearest < 50) * (1 + green[:, None] / 10)}


@pytest.fixture
def setting():
  return Setting(
    open_source=lambda split: Colours(),
    transform=EvalTransform((8, 8)),
    objective=Computed(by_red, 3),
    mesh=sharding.make_mesh(jax.devices()[:2]),
    batch_size=16,
    reader=Reader(),
  )


def test_most_confident_mistakes_come_first(setting):
  found = reporting.predict_examples(setting, jnp.float32(1), 'test')
  assert (found['count'], found['total']) == (50, 50)
  assert found['accuracy'] == pytest.approx(0.9)
  wrong = [4, 14, 24, 34, 44]
  titles = [entry['caption'][2] for entry in found['mistakes']]
  assert titles == [f'<{index}>.png' for index in reversed(wrong)]
  first = found['mistakes'][0]['caption']
  assert first[0].startswith('dark') and first[1] == 'is bright'  # 44: 200 → 0
  assert found['examples'][0]['caption'][1:] == ['right', '<0>.png']


def test_examples_are_spread_over_a_large_split(setting):
  found = reporting.predict_examples(setting, jnp.float32(1), 'test', count=5)
  titles = [entry['caption'][2] for entry in found['examples']]
  assert titles == ['<0>.png', '<12>.png', '<24>.png', '<37>.png', '<49>.png']
  assert (found['count'], found['total']) == (5, 50)


def test_own_splits_leave_out_other_sources():
  """An evaluator of another source names a split of that source."""
  evals = {
    'shots': {'split': 'test', 'source': {'name': 'tfds'}},
    'lab': {'every': '1 epochs'},
    'val': {'split': 'validation', 'source': None},
  }
  assert features.own_splits(evals) == ['validation']
