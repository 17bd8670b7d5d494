"""Tests of the images in an HTML report, and of failures while making it."""

import base64
import json

import cv2
import jax
import numpy as np
import pytest
from etils import epath
from minimal_config import completed

from vit_jax.analysis import report
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

  def fail(*arguments):
    raise error

  experiment, source = built()
  setting = data.evaluation_setting(experiment, source.class_names)
  monkeypatch.setattr(reporting, 'predict_examples', fail)
  caplog.set_level('INFO', 'vit_jax')
  path = epath.Path(tmp_path)
  reporting.write(path, experiment, setting, {}, source, 5)
  assert 'predictions' in caplog.text
  written = json.loads((path / report.PICTURES).read_text())
  assert written['step'] == 5 and len(written['training']) == 24
  assert 'judged' not in written


def test_captions_of_several_labels_and_numbers():
  """Every image has a caption, also one without any of the classes."""
  names = ['a', 'b', 'c', 'd', 'e']
  for target, expected in (
    ([1, 0, 1, 0, 0], ['a 1.00', 'c 1.00']),
    ([0.3, 0, 0, 0.7, 0], ['d 0.70', 'a 0.30']),
    ([1] * 5, ['a 1.00', 'b 1.00', 'c 1.00', 'd 1.00']),
    ([0] * 5, ['none']),
  ):
    assert reporting.caption(np.array(target), names, 'labels') == expected
  numbers = reporting.caption(np.array([3.14159, 1e-9]), ['x', 'y'], 'numbers')
  assert numbers == ['x 3.142', 'y 1e-09']
