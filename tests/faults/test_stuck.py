"""A peer that sleeps or dies ends the others in a stated time."""

import signal
import time

import pytest
from etils import epath

from tests import runs
from tests.faults.test_preemption import LONGER
from vit_jax.watchdog import EXIT_STUCK, Watchdog

LIMITS = {
  'total': '2000 steps',
  'evals.val.every': '1000 steps',
  'recovery.watchdog_min_s': 8,
  'recovery.watchdog_pause_s': 90,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sleeping_peer(tmp_path):
  """SIGSTOP to one of two: the other exits 44 within the limit, with stacks."""
  workdir = tmp_path / 'run'
  processes = runs.start_pair(workdir, LONGER | LIMITS, devices=2)
  try:
    runs.wait_for_step(workdir, 8, processes)
    processes[1].send_signal(signal.SIGSTOP)
    start = time.monotonic()
    _, err = runs.finish(processes[0], code=EXIT_STUCK)
    assert time.monotonic() - start < 60
    assert 'stuck: no step within' in err
    stacks = (workdir / 'stacks.txt').read_text()
    assert 'loop.py' in stacks and 'Thread' in stacks
  finally:
    for process in processes:
      process.kill()
      process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dead_peer(tmp_path):
  """SIGKILL to one of two: the other ends by itself, not with success."""
  workdir = tmp_path / 'run'
  processes = runs.start_pair(workdir, LONGER | LIMITS, devices=2)
  try:
    runs.wait_for_step(workdir, 8, processes)
    processes[1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    processes[0].wait(timeout=120)
    assert time.monotonic() - start < 120
    assert processes[0].returncode in (44, 45, -6, 134)
  finally:
    for process in processes:
      process.kill()
      process.communicate()


def test_watchdog_is_patient_while_paused(tmp_path):
  """Slow work inside `pause` and steps in time do not end the process."""
  watchdog = Watchdog(
    epath.Path(tmp_path) / 'stacks.txt', factor=1000, min_s=5, pause_s=5
  )
  for _ in range(5):
    watchdog.step()
    time.sleep(0.01)
  with watchdog.pause():
    time.sleep(0.5)
  watchdog.step()
  watchdog.close()
  assert not (tmp_path / 'stacks.txt').exists()
