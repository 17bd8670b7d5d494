"""Tests that a run whose last step is not on disk does not claim success."""

import contextlib
import pathlib
import shutil
import signal
import subprocess

import pytest

from tests import cli
from tests.faults.counts import further, injected


@contextlib.contextmanager
def _immutable(folder: pathlib.Path):
  """Makes it impossible to create files in a folder, even for root."""
  if not shutil.which('chattr'):
    pytest.skip('needs chattr')
  changed = subprocess.run(['chattr', '+i', str(folder)], capture_output=True)
  if changed.returncode:
    pytest.skip('chattr +i needs root and a file system that knows it')
  try:
    yield
  finally:
    subprocess.run(['chattr', '-i', str(folder)], check=True)


@contextlib.contextmanager
def _replaced(folder: pathlib.Path):
  """Replaces a folder by a file."""
  aside = folder.with_name('aside')
  folder.rename(aside)
  folder.write_text('')
  try:
    yield
  finally:
    folder.unlink()
    aside.rename(folder)


@pytest.mark.slow
@pytest.mark.parametrize('hindrance', [_replaced, *further(_immutable)])
def test_a_preempted_run_that_cannot_save_does_not_exit_42(tmp_path, hindrance):
  """The message names the step, and what is saved and where."""
  checkpoints = tmp_path / 'run/checkpoints'
  process = cli.start(cli.train_command(tmp_path / 'run', **cli.ENDLESS))
  cli.wait_for_step(tmp_path / 'run', 2, [process])
  with hindrance(checkpoints):
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
