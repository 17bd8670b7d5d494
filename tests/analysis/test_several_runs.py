"""Tests of curves of several runs, and of their results over data size."""

import io
import json

import numpy as np
import pytest
from etils import epath
from PIL import Image

from vit_jax import analyze
from vit_jax.analysis import curves, plotting
from vit_jax.errors import UserError

TIME = '2030-01-01T00:00:00+00:00'
CONFIG = {'batch_size': 1000, 'train': {'num_examples': 50_000}}


def make(path, metrics, run, events=(), config=CONFIG):
  path.mkdir()
  (path / 'config.json').write_text(json.dumps(config))
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
  values = {axis: run.over(axis, 'loss')[0].tolist() for axis in curves.AXES}
  assert values['steps'] == [20, 40, 70, 100]
  assert values['epochs'] == pytest.approx([0.4, 0.8, 1.4, 2])
  assert values['images'] == pytest.approx([0.02, 0.04, 0.07, 0.1])  # millions
  assert values['exaflops'] == pytest.approx([20, 40, 70, 100])
  days = [4 * s / 86400 for s in (7200, 14400, 28800, 43200)]
  assert values['core_days'] == pytest.approx(days)
  assert run.over('steps', 'test/accuracy').tolist() == [[100], [0.5]]


def test_runs_without_metrics_are_refused(tmp_path):
  run = make(tmp_path / 'unlogged', [], {})
  with pytest.raises(UserError, match='loss.*: unlogged'):
    curves.compare([run])
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


VIT = {'name': 'vit', 'depth': 3, 'patch_size': 4}


def run_of(path, examples, model, *values):
  config = {'batch_size': 8, 'train': {'num_examples': examples}}
  config |= {'model': model} if model else {}
  lines = [
    {'step': step, 'loss': 1.0, 'test/accuracy': value, 'test/count': 100}
    for step, value in enumerate(values)
  ]
  return make(path, lines, {}, config=config)


@pytest.fixture
def several(tmp_path):
  wide = VIT | {'patch_size': 8}
  cases = [
    (50_000, VIT, 0.2, 0.7),
    (2_500, VIT, 0.3),
    (2_500, VIT, 0.5),
    (2_500, wide, 0.4),
    (50_000, {'name': 'resnet', 'depths': [1]}, 0.6),
    (10, None, 0.1),
  ]
  return [
    run_of(tmp_path / str(number), *case) for number, case in enumerate(cases)
  ]


def test_the_last_result_of_each_run_at_its_data_size(several):
  """Labels are model names, and keys in which models of one name differ."""
  figure, arrays = curves.compare_sizes(several)
  Image.open(io.BytesIO(plotting.png(figure))).load()
  # There are no counts, and no training loss.
  assert {key: points.T.tolist() for key, points in arrays.items()} == {
    'resnet/test/accuracy': [[50_000, 0.6]],
    'vit patch_size=4/test/accuracy': [
      [2_500, 0.3],
      [2_500, 0.5],
      [50_000, 0.7],
    ],
    'vit patch_size=8/test/accuracy': [[2_500, 0.4]],
  }
  with pytest.raises(UserError, match='model.*num_examples.*5'):
    curves.compare_sizes(several[-1:])


def test_workdirs_without_metrics_are_left_out(several, tmp_path, caplog):
  """A run that was refused at its start leaves an empty directory."""
  del several
  out, empty = str(tmp_path / 'out'), tmp_path / 'refused'
  empty.mkdir()
  paths = [str(tmp_path / name) for name in ('0', 'refused', '1')]
  with caplog.at_level('WARNING', 'vit_jax'):
    analyze._compare('sizes', paths, out)
  assert str(empty) in caplog.text and 'metrics.jsonl' in caplog.text
  assert np.load(f'{out}/sizes.npz')['vit/test/accuracy'].shape == (2, 2)
  for wrong in ([*paths, str(tmp_path / '9')], [str(empty)]):
    with pytest.raises(UserError, match='metrics.jsonl'):
      analyze._compare('sizes', wrong, out)
