"""Tests of stuck processes."""

import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
from etils import epath

from tests import cli
from tests.faults.counts import injected
from vit_jax.errors import EXIT_STUCK
from vit_jax.processes import peers
from vit_jax.processes.watchdog import Watchdog


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_peer_ends_the_others_with_44(tmp_path):
  """SIGSTOP to one of two: the other exits within the limit, with stacks."""
  workdir = tmp_path / 'run'
  # Well below the 30 s after which JAX regards a sleeping peer as lost (45),
  # also on a machine whose steps take seconds.
  limits = cli.ENDLESS | {
    'recovery.watchdog_factor': 3.0,
    'recovery.watchdog_min_s': 5,
    'recovery.watchdog_pause_s': 90,
  }
  with cli.running_pair(workdir, limits, devices=2) as processes:
    processes[1].send_signal(signal.SIGSTOP)
    injected('a sleeping peer')
    _, err = cli.finish(processes[0], code=EXIT_STUCK, timeout_s=60)
    assert 'stuck: ' in err
    stacks = (workdir / 'stacks.txt').read_text()
    assert 'loop.py' in stacks and 'Thread' in stacks


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hanging_evaluation_ends_with_44(tmp_path):
  """The limit of a batch of an evaluation applies."""
  injected('an evaluation that hangs')
  changes = {
    'source.name': 'tests.faults.hangs',
    'evals.val.every': '2 steps',
    'recovery.watchdog_eval_s': 20,  # includes compiling, in the first batch
  }
  command = cli.train_command(tmp_path / 'run', **changes)
  _, err = cli.run(command, code=EXIT_STUCK)
  assert 'within 20.0 s' in err
  assert 'classification.py' in (tmp_path / 'run/stacks.txt').read_text()


WATCHED = """
import sys, time
from etils import epath
from vit_jax.processes.watchdog import Watchdog
Watchdog(epath.Path(sys.argv[1]), factor=1.0, min_s=4.0, pause_s=4.0)
print('started', flush=True)
time.sleep(100)
"""


@pytest.mark.long
def test_time_while_stopped_is_not_a_stall(tmp_path):
  """After Ctrl-Z and `fg`, a process has the rest of its time limit."""
  process = subprocess.Popen(
    [sys.executable, '-c', WATCHED, str(tmp_path / 'stacks.txt')],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  )
  with process:
    assert process.stdout.readline() == b'started\n'
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    continued = time.monotonic()
    assert process.wait(60) == EXIT_STUCK
  assert time.monotonic() - continued > 1.5


def test_time_limits(tmp_path):
  """A step has a multiple of the median, at least `min_s`.

  Before three steps and in a pause it is `pause_s`; each batch of an evaluation
  starts its own limit again.
  """
  watchdog = Watchdog(
    epath.Path(tmp_path) / 'stacks.txt', factor=20, min_s=60, pause_s=500
  )
  with watchdog.pause(50):
    first = watchdog._deadline
    watchdog.alive()
    assert watchdog._limit_s == 50 and watchdog._deadline > first
  for times, limit_s in (
    ([4.0, 5.0], 500),
    ([90.0], 20 * 5.0),
    ([1.0, 1.0, 1.0], 60),
  ):
    watchdog._times.extend(times)
    with watchdog.pause():
      assert watchdog._limit_s == 500
    assert watchdog._limit_s == limit_s
  watchdog.close()
  assert not (tmp_path / 'stacks.txt').exists()


def test_a_stuck_process_without_threads_still_ends(tmp_path, monkeypatch):
  """With little memory, the stack traces are written to stderr only."""
  file = epath.Path(tmp_path) / 'stacks.txt'
  watchdog = Watchdog(file, factor=1000, min_s=60, pause_s=60)
  watchdog.close()
  leave, start = mock.Mock(), mock.Mock(side_effect=RuntimeError('no thread'))
  monkeypatch.setattr(peers, 'exit_now', leave)
  monkeypatch.setattr('faulthandler.dump_traceback', mock.Mock())
  monkeypatch.setattr('threading.Thread.start', start)
  watchdog._end_process()
  leave.assert_called_once_with(EXIT_STUCK)
