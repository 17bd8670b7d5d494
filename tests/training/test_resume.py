"""Tests of what a resumed run repeats."""

import logging
import shutil

import pytest
from etils import epath
from minimal_config import completed

from tests import cli
from vit_jax.training import compiling, loop

CHANGES = {
  'source': {'name': 'synthetic', 'num_examples': 64, 'num_classes': 10},
  'train.split': 'train[:64]',
  'total': '6 steps',
  'checkpoint.every': '3 steps',
  'log': {'every': '4 steps'},
  'log.tensorboard': False,
  'log.curves': False,
  'log.report': False,
  'evals': {},
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns a workdir after a whole run of six steps."""
  folder = epath.Path(tmp_path_factory.mktemp('trained')) / 'run'
  loop.run(completed(**CHANGES), folder)
  return folder


@pytest.fixture
def workdir(trained, tmp_path, caplog):
  """Returns a copy of it."""
  caplog.set_level(logging.INFO, 'vit_jax')
  return epath.Path(shutil.copytree(trained, tmp_path / 'run'))


def lines(workdir):
  """Returns the lines of metrics.jsonl by step and kind, without times."""
  return {(line['step'], 'loss' in line): line for line in cli.lines(workdir)}


def files(workdir):
  return {path.name: path.read_bytes() for path in workdir.glob('*.json*')}


@pytest.mark.slow
def test_an_interval_of_the_log_continues_after_a_restart(workdir):
  """Step 4 is logged with the mean of steps 1 to 4.

  The run is restored at step 3, in the middle of the interval.
  """
  before = lines(workdir)
  shutil.rmtree(workdir / 'checkpoints/6')
  loop.run(completed(**CHANGES), workdir)
  assert {step for step, _ in before} == {4, 6}
  assert lines(workdir) == before


@pytest.mark.slow
def test_a_finished_run_computes_nothing(workdir, monkeypatch, caplog):
  """Its model is not built, its files do not change, and the log says so."""
  before = files(workdir)
  monkeypatch.setattr(loop, 'open_session', pytest.fail)
  assert loop.run(completed(**CHANGES), workdir) == {}
  (message,) = caplog.messages
  assert f'{workdir}' in message and 'step 6' in message
  assert files(workdir) == before


@pytest.mark.slow
def test_a_run_that_is_only_evaluated_compiles_nothing(
  workdir, monkeypatch, caplog
):
  """It says so before anything else, and its metrics do not change.

  The run was killed after its last step and before its end.
  """
  before = lines(workdir)
  cli.remove_finished_event(workdir)
  monkeypatch.setattr(compiling, 'compile_to_run', pytest.fail)
  loop.run(completed(**CHANGES), workdir)
  ended = f'{workdir} has ended at step 6 of 6'
  assert caplog.text.index(ended) < caplog.text.index('parameters')
  assert lines(workdir) == before


@pytest.mark.long
def test_a_run_that_ends_early(tmp_path, monkeypatch, caplog):
  """An interrupted run ends at the same step, and an ended one stays so."""
  caplog.set_level(logging.INFO, 'vit_jax')
  workdir = epath.Path(tmp_path) / 'run'
  evaluator = dict(name='classification', split='val', every='1 steps')
  changes = CHANGES | {
    'schedule.base_lr': 0.0,  # the accuracy does not change
    'train.balanced': True,
    'checkpoint.best': 'val/accuracy',
    'checkpoint.keep': 3,
    'evals': {'val': evaluator},
    'early_stop_patience': 1,
  }
  loop.run(completed(**changes), workdir)
  before = lines(workdir)
  assert max(before) == (2, False) and 'finished at step 2' in caplog.text
  with monkeypatch.context() as patched:
    patched.setattr(compiling, 'compile_to_run', pytest.fail)
    loop.run(completed(**changes), workdir)
    assert f'{workdir} has finished: step 2' in caplog.text
  # With a change of the config, the evaluation runs again.
  caplog.clear()
  loop.run(completed(**changes | {'checkpoint.keep': 4}), workdir)
  assert 'ending early at step 2 of 6: val/accuracy' in caplog.text
  assert lines(workdir) == before
  shutil.rmtree(workdir / 'checkpoints/2')
  loop.run(completed(**changes), workdir)
  assert lines(workdir) == before
  loop.run(completed(**changes | {'early_stop_patience': None}), workdir)
  assert max(lines(workdir)) == (6, True)
