"""Tests of the values and errors of experiment trackers."""

import importlib
import shutil
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest
from etils import epath
from minimal_config import completed
from tensorboard.backend.event_processing import event_accumulator

from tests import cli
from vit_jax.config.completion import flatten
from vit_jax.errors import UserError
from vit_jax.run import metrics, tracking

MODULES = 'vit_jax.run.trackers.'


def config_of(**tracker):
  return completed(**{'log.trackers': {'mine': tracker}})


def opened(folder, config, active=True):
  settings = metrics.Log(**config.log.to_dict())
  run = tracking.Run(epath.Path(folder), flatten(config))
  trackers = tracking.open_trackers(settings, run) if active else []
  return metrics.Writer(run.workdir, active, trackers)


@pytest.fixture
def wandb(monkeypatch):
  """Returns a replacement of the package wandb, which records its calls."""
  package = mock.Mock()
  monkeypatch.setitem(sys.modules, 'wandb', package)
  monkeypatch.delitem(sys.modules, f'{MODULES}wandb', raising=False)
  importlib.import_module(f'{MODULES}wandb')
  yield package
  sys.modules.pop(f'{MODULES}wandb', None)


def test_a_missing_tracker_package_is_reported(monkeypatch):
  """The message comes when the config is read."""
  monkeypatch.setitem(sys.modules, 'wandb', None)
  monkeypatch.delitem(sys.modules, f'{MODULES}wandb', raising=False)
  with pytest.raises(UserError, match='not installed: pip install wandb'):
    config_of(name='wandb')
  with pytest.raises(UserError, match='log.trackers.mine'):
    completed(**{'log.trackers': {'mine': 3}})


def test_calls_of_weights_and_biases(tmp_path, wandb):
  """The documented calls are made in order, by the main process only."""
  given = dict(project='p', entity='e', mode='offline')
  config = config_of(name='wandb', **given)
  opened(tmp_path / 'other', config, active=False).close()
  assert not wandb.mock_calls
  writer = opened(tmp_path, config)
  writer.write(3, {'loss': 0.5, 'bad': float('inf')})
  writer.close()
  [(_, _, settings), *rest] = wandb.mock_calls
  assert rest == [
    mock.call.init().log({'loss': 0.5, 'bad': float('inf')}, step=3),
    mock.call.init().finish(),
  ]
  assert settings['config']['model.depth'] == 2
  given |= dict(name=tmp_path.name, resume='allow', dir=str(tmp_path))
  given['id'] = tracking.Run(epath.Path(tmp_path), {}).identity
  assert settings.items() >= given.items()


def test_only_the_same_workdir_continues_a_tracked_run(tmp_path):
  """A workdir that was removed and begun again is another run."""
  run = tracking.Run(epath.Path(tmp_path / 'run'), {})
  first = run.identity
  assert run.identity == first
  shutil.rmtree(tmp_path / 'run')
  assert run.identity != first


@pytest.mark.parametrize('at_start', [True, False])
def test_tracker_errors_are_logged_once(tmp_path, caplog, wandb, at_start):
  """Metrics.jsonl is complete."""
  failing = wandb.init if at_start else wandb.init.return_value.log
  failing.side_effect = RuntimeError('no key')
  writer = opened(tmp_path, config_of(name='wandb'))
  for step in (1, 2):
    writer.write(step, {'loss': 1.0})
  writer.close()
  assert caplog.text.count('trackers.mine failed (RuntimeError: no key)') == 1
  assert len(cli.records(tmp_path)) == 2


def test_tensorboard_is_optional(tmp_path, caplog, monkeypatch):
  """Without its package, the log says so, and metrics.jsonl is written."""
  monkeypatch.setitem(sys.modules, 'tensorboard.compat.proto.event_pb2', None)
  monkeypatch.delitem(sys.modules, f'{MODULES}tensorboard', raising=False)
  writer = opened(tmp_path, completed(**{'log.tensorboard': True}))
  writer.write(1, {'loss': 1.0})
  writer.close()
  assert 'the tracker config.log.tensorboard failed' in caplog.text
  assert "'tensorboard.compat" in caplog.text
  assert [path.name for path in tmp_path.iterdir()] == ['metrics.jsonl']


# TensorBoard then reads files without TensorFlow, whose import takes seconds.
sys.modules.setdefault(
  'tensorboard.compat.notf', types.ModuleType('tensorboard.compat.notf')
)


def read_events(folder):
  """Returns (step, value) by name, as TensorBoard reads them."""
  events = event_accumulator.EventAccumulator(str(folder)).Reload()
  return {
    name: [(event.step, event.value) for event in events.Scalars(name)]
    for name in events.Tags()['scalars']
  }


def test_tensorboard_shows_each_step_once(tmp_path):
  """Each start adds a file and rewinds to its step, as does a rollback."""
  config = completed(**{'log.tensorboard': True})
  # Steps to rewind to, and the first step that is trained after each.
  for starts in (((0, 1),), ((2, 3), (3, 4))):
    writer = opened(tmp_path, config)
    for restored, first in starts:
      writer.rewind(restored)
      if restored:  # evaluations at the restored step are repeated
        writer.write(restored, {'val/accuracy': float('inf')})
      for step in range(first, 5):
        writer.write(step, {'loss': 1 / step, 'img_per_sec': float('nan')})
        writer.write(step, {'val/accuracy': float('inf')})
    writer.close()
  assert len(list(tmp_path.glob('events.out.tfevents.*'))) == 2
  read = read_events(tmp_path)
  assert read.keys() == {'loss', 'img_per_sec', 'val/accuracy'}
  for values in read.values():
    assert [step for step, _ in values] == [1, 2, 3, 4]
  expected = [float(np.float32(1 / step)) for step in range(1, 5)]
  assert [value for _, value in read['loss']] == expected
  assert {value for _, value in read['val/accuracy']} == {float('inf')}


@pytest.mark.slow
def test_training_does_not_import_tensorflow():
  """Importing it takes seconds, at every start of a run."""
  script = (
    'import sys\n'
    'import vit_jax.train, vit_jax.run.trackers.tensorboard\n'
    'assert "tensorboard" in sys.modules and "tensorflow" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', script], check=True)


def test_tensorboard_events_are_uploaded(tmp_path, monkeypatch):
  """They are copied to an object store once a minute and at the end."""
  module = importlib.import_module(f'{MODULES}tensorboard')
  monkeypatch.setattr(module.paths, 'is_remote', lambda _: True)
  now = 0.0
  monkeypatch.setattr(module.time, 'monotonic', lambda: now)
  tracker = module.Tracker(tracking.Run(epath.Path(tmp_path), {}))
  tracker.write(1, {'loss': 2.0})
  assert not list(tmp_path.iterdir())
  now = 61.0
  tracker.write(2, {'loss': 1.0})
  assert read_events(tmp_path) == {'loss': [(1, 2.0), (2, 1.0)]}
  tracker.write(3, {'loss': 0.5})
  assert len(read_events(tmp_path)['loss']) == 2
  tracker.close()
  assert len(read_events(tmp_path)['loss']) == 3
