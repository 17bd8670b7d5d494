"""Tests that two processes restore together what one of them cannot read."""

import shutil
import sys
import time

import pytest

from tests import cli
from tests.faults.counts import injected

TRAINING = cli.SMALL_L16 | {
  'total': '12 steps',
  'schedule.warmup': '2 steps',
  'checkpoint.every': '4 steps',
  'evals.val.every': '12 steps',
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Returns a run on two processes with saved steps 4 and 8."""
  workdir = tmp_path_factory.mktemp('agreed') / 'run'
  for process in cli.start_pair(workdir, TRAINING, devices=1):
    cli.finish(process)
  shutil.rmtree(workdir / 'checkpoints/12')  # as if it had been stopped
  assert (workdir / 'checkpoints/8').is_dir()
  return workdir


def _resume(saved, folder, kind, code):
  """Resumes the run; returns both processes' messages, the failing one last."""
  shutil.copytree(saved, folder)
  injected(f'one of two processes: {kind}')
  arguments = cli.flags('configs/l16_i21k.py', folder, TRAINING)
  module = 'tests.multiprocess.failing_checkpoints'
  start = time.monotonic()
  processes = cli.start_group(
    [sys.executable, '-m', module, kind, '1', *arguments]
  )
  errors = [cli.finish(process, code)[1] for process in processes]
  # At a barrier that one process has left, the other would wait for 300 s.
  assert time.monotonic() - start < 240
  assert not any('Traceback' in error for error in errors), errors
  return errors


def _steps(workdir):
  return sorted(
    p.name for p in (workdir / 'checkpoints').iterdir() if p.is_dir()
  )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_temporary_error_is_retried_by_both(saved, tmp_path):
  """Both continue from the newest step."""
  errors = _resume(saved, tmp_path / 'run', 'EIO once', 0)
  assert 'resuming at step 8' in errors[0]
  assert 'process 1 failed' in errors[0] and 'Trying again' in errors[0]
  assert '[Errno 5] injected. Trying again in 1 s' in errors[1]
  assert _steps(tmp_path / 'run') == ['12', '4', '8']


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_lasting_error_ends_both(saved, tmp_path):
  """Each prints one message; nothing is renamed."""
  errors = _resume(saved, tmp_path / 'run', 'EIO always', 1)
  for error in errors:
    assert 'Nothing was renamed' in error.strip().splitlines()[-1]
  assert _steps(tmp_path / 'run') == ['4', '8']


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damage_on_one_process_makes_both_fall_back(saved, tmp_path):
  """Both continue from the older step."""
  errors = _resume(saved, tmp_path / 'run', 'damaged', 0)
  assert 'resuming at step 4' in errors[0]
  assert '8 is damaged' in errors[1] and 'DATA_LOSS: injected' in errors[1]
  assert _steps(tmp_path / 'run') == ['12', '4', '8', '8.bad']


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_failed_last_save_ends_both_with_1(saved, tmp_path):
  """It fails while process 1 writes."""
  errors = _resume(saved, tmp_path / 'run', 'limit', 1)
  for error in errors:
    last = error.strip().splitlines()[-1]
    assert last.startswith('storage failed: step 12 could not be saved (')
    assert 'File too large' in last
  assert 'process 1: ' in errors[0].splitlines()[-1]
  assert _steps(tmp_path / 'run') == ['4', '8']
