"""Tests that a run whose last step is not on disk does not claim success."""

import signal

import pytest

from tests import cli
from tests.faults.counts import injected


@pytest.mark.slow
def test_a_preempted_run_that_cannot_save_does_not_exit_42(tmp_path):
  """The message names the step, and what is saved and where."""
  checkpoints = tmp_path / 'run/checkpoints'
  process = cli.start(cli.train_command(tmp_path / 'run', **cli.ENDLESS))
  cli.wait_for_step(tmp_path / 'run', 2, [process])
  checkpoints.rename(tmp_path / 'aside')
  checkpoints.write_text('')  # a file in place of the directory
  injected('a signal, and no way to save')
  process.send_signal(signal.SIGTERM)
  _, err = cli.finish(process, code=1)
  assert 'could not be saved' in err and 'Traceback' not in err
  last = err.strip().splitlines()[-1]
  assert last.startswith('storage failed: step ')
  assert f'the newest saved step of {checkpoints} is None' in last
  step = last.split()[3]
  assert f'SAVING STEP {step} FAILED (2 failure(s) so far)' in err
  assert 'preempted: ' not in err
