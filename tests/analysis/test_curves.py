"""Tests of the axes of curves, and of the names of several runs."""

import json

import pytest
from etils import epath

from vit_jax.analysis import curves
from vit_jax.errors import UserError

TIME = '2030-01-01T00:00:00+00:00'
CONFIG = {'batch_size': 1000, 'train': {'num_examples': 50_000}}


def make(path, metrics, run, events):
  path.mkdir()
  (path / 'config.json').write_text(json.dumps(CONFIG))
  (path / 'run.json').write_text(json.dumps(run))
  for name, lines in (('metrics', metrics), ('events', events)):
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (path / f'{name}.jsonl').write_text(text)
  return curves.read_run(epath.Path(path))


def spans(step, seconds):
  return dict(time=TIME, event='spans', step=step, seconds={'step': seconds})


@pytest.fixture
def run(tmp_path):
  """Returns a run of 100 steps in half a day; 20 steps were repeated."""
  events = [
    dict(time=TIME, event='start', step=0),
    spans(40, 14400),
    spans(60, 9999),  # lost steps
    dict(time=TIME, event='start', step=40),
    spans(100, 28800),
  ]
  metrics = [{'step': s, 'loss': 5 - s / 50} for s in (20, 40, 70, 100)]
  metrics.append({'step': 100, 'test/accuracy': 0.5})
  about = {'num_devices': 4, 'train_flops_per_image': 1e15}
  return make(tmp_path / 'run', metrics, about, events)


def test_values_of_each_axis(run):
  """Steps, epochs, images, core-days and exaFLOPs."""
  values = {axis: run.over(axis, 'loss')[0].tolist() for axis in run.scales}
  assert values['steps'] == [20, 40, 70, 100]
  assert values['epochs'] == pytest.approx([0.4, 0.8, 1.4, 2])
  assert values['images'] == pytest.approx([0.02, 0.04, 0.07, 0.1])  # millions
  assert values['exaflops'] == pytest.approx([20, 40, 70, 100])
  days = [4 * s / 86400 for s in (7200, 14400, 28800, 43200)]
  assert values['core_days'] == pytest.approx(days)
  assert run.over('steps', 'test/accuracy').tolist() == [[100], [0.5]]


def test_runs_without_metrics_are_refused(tmp_path):
  with pytest.raises(UserError, match=f'{tmp_path}.*metrics.jsonl'):
    curves.read_run(epath.Path(tmp_path))


def test_names_distinguish_runs():
  """Directories that all paths have in common are removed at both ends."""

  def names(*paths):
    return curves.names([epath.Path(path) for path in paths])

  assert names('/a/vit/final', '/a/resnet/final/') == ['vit', 'resnet']
  assert names('/a/x/1', '/a/y/2') == ['x/1', 'y/2']
  assert names('/a/run') == ['run']
  assert names('gs://b/run', 'gs://b/run') == ['run', 'run']
  assert names('/a', '/a/b') == ['a', 'a/b']
