"""Tests of the images and predictions in an HTML report."""

import base64
import json
from unittest import mock

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from indexed_source import Computed
from minimal_config import completed

from vit_jax.analysis import report
from vit_jax.arrays import sharding
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.data.contract import Source
from vit_jax.data.pipeline.stream import Reader
from vit_jax.evaluators import features
from vit_jax.evaluators.contract import Setting
from vit_jax.processes.preemption import StopRequested
from vit_jax.training import data, reporting
from vit_jax.training.experiment import Experiment

SOURCE = {'name': 'synthetic', 'num_examples': 64, 'num_classes': 10}


def built(**changes):
  config = completed(source=SOURCE, **changes)
  with jax.default_device(jax.devices()[0]):
    experiment = Experiment.build(config, jax.devices()[:2])
  return experiment, data.open_train(experiment)


def decoded(entry):
  file = base64.b64decode(entry['src'].partition(',')[2])
  array = np.frombuffer(file, np.uint8)
  return cv2.imdecode(array, cv2.IMREAD_COLOR_RGB)


def test_training_images_are_those_of_the_first_batch():
  """They are equal bit for bit, with their classes; a batch is smaller."""
  experiment, source = built()
  entries = reporting.training_images(experiment, source, experiment.mesh)
  assert len(entries) == 24
  with data.train_batches(experiment, source, 0) as batches:
    batch = jax.device_get(next(batches))
  for row, entry in zip(range(8), entries, strict=False):
    np.testing.assert_array_equal(decoded(entry), batch['image'][row])
    assert entry['caption'] == [source.class_names[batch['label'][row]]]


def test_captions_of_mixed_images_name_both_classes():
  experiment, source = built(**{'mix.mixup': 1.0})
  entries = reporting.training_images(experiment, source, experiment.mesh)
  mixed = [e['caption'] for e in entries if len(e['caption']) == 2]
  assert len(mixed) > 12
  for lines in mixed:
    shares = [float(line.rpartition(' ')[2]) for line in lines]
    assert sum(shares) == pytest.approx(1, abs=0.011)
    assert shares[0] >= shares[1]


def test_all_crops_without_labels_are_shown():
  crops = np.arange(2 * 3 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 4, 3)
  entries = reporting._unlabelled({'crops': crops, 'mask': np.ones(2, bool)}, 3)
  assert [lines for _, lines in entries] == [['crops']] * 6
  np.testing.assert_array_equal(entries[4][0], crops[1, 1])


@pytest.mark.parametrize('error', [ValueError('lost'), StopRequested()])
def test_errors_in_the_report_do_not_end_the_run(
  error, tmp_path, monkeypatch, caplog
):
  """The rest of the report is written."""
  experiment, source = built()
  setting = data.evaluation_setting(experiment, source.class_names)
  failing = mock.Mock(side_effect=error)
  monkeypatch.setattr(reporting, 'predict_examples', failing)
  caplog.set_level('INFO', 'vit_jax')
  path = epath.Path(tmp_path)
  reporting.write(path, experiment, setting, {}, source, 5)
  assert 'predictions' in caplog.text
  written = json.loads((path / report.PICTURES).read_text())
  assert written['step'] == 5 and len(written['training']) == 24
  assert 'judged' not in written


@pytest.mark.parametrize(
  'kind, target, expected',
  [
    ('labels', [0.3, 0, 0, 0.7, 0], ['d 0.70', 'a 0.30']),
    ('labels', [1] * 5, ['a 1.00', 'b 1.00', 'c 1.00', 'd 1.00']),
    ('labels', [0] * 5, ['none']),
    (
      'numbers',
      [3.14159, 1e-9, 0, 1, 2],
      [
        'a 3.142',
        'b 1e-09',
        'c 0',
        'd 1',
        'e 2',
      ],
    ),
  ],
)
def test_captions_of_several_labels_and_numbers(kind, target, expected):
  """Every image has a caption, also one without any of the classes."""
  assert reporting.caption(np.array(target), list('abcde'), kind) == expected


class Colours(Source):
  """Images whose red gives the class, except for every tenth image."""

  name, num_classes, class_names = 'colours', 3, ['dark', 'middle', 'bright']

  def __len__(self):
    return 50

  def __getitem__(self, index):
    is_wrong = index % 10 == 4
    red = 100 * ((index + is_wrong) % 3)
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
  """Returns the setting of an evaluator of colours."""
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
  assert found['matrix'] == [[16, 1, 0], [0, 15, 2], [2, 0, 14]]
  wrong = [4, 14, 24, 34, 44]
  titles = [entry['caption'][2] for entry in found['mistakes']]
  assert titles == [f'<{index}>.png' for index in reversed(wrong)]
  first = found['mistakes'][0]['caption']
  assert first[0].startswith('dark') and first[1] == 'is bright'  # 44: 200 → 0
  assert found['examples'][0]['caption'][1:] == ['right', '<0>.png']


def test_classes_with_the_same_name_are_distinguished(setting):
  source = Colours()
  source.class_names = ['dark', 'middle', 'dark']
  made = setting._replace(open_source=lambda split: source)
  found = reporting.predict_examples(made, jnp.float32(1), 'test')
  caption = found['mistakes'][0]['caption']
  assert caption[0].startswith('dark') and caption[1] == 'is dark'


def test_examples_are_spread_over_a_large_split(setting):
  found = reporting.predict_examples(setting, jnp.float32(1), 'test', count=5)
  titles = [entry['caption'][2] for entry in found['examples']]
  assert titles == ['<0>.png', '<12>.png', '<24>.png', '<37>.png', '<49>.png']
  assert (found['count'], found['total']) == (5, 50)


def test_own_splits_leave_out_other_sources():
  """An evaluator of another source names a split of that source."""
  other = {'split': 'test', 'source': {'name': 'tfds'}}
  own = {'split': 'validation', 'source': None}
  evals = {'shots': other, 'lab': {'every': '1 epochs'}, 'val': own}
  assert features.own_splits(evals) == ['validation']
