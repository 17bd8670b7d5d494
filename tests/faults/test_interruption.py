"""Tests of signals before the first step of a run, and after its last."""

import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from tests import cli
from tests.faults.counts import further, injected
from vit_jax.processes import peers, preemption
from vit_jax.processes.interruption import HANDLER

# Stops at the import of a module, or at the end of a run, until 'go' exists.
HOLD = """
import pathlib, runpy, sys, time
where, folder, sys.argv = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[2:]
sys.orig_argv[:] = [sys.executable, '-m', 'vit_jax.train', *sys.argv[1:]]

def hold():
  (folder / 'there').touch()
  while not (folder / 'go').exists():
    time.sleep(0.02)

class Finder:
  def find_spec(self, name, path=None, target=None):
    if name == where:
      sys.meta_path.remove(self)
      hold()

sys.meta_path.insert(0, Finder())
if where == 'the end':
  from vit_jax.analysis import curves
  draw = curves.draw
  curves.draw = lambda path: (draw(path), hold())
runpy.run_module('vit_jax.train', run_name='__main__')
"""

SHORT = {'total': '2 steps', 'schedule.warmup': '1 steps', 'model.depth': 1}
SHORT |= {'log.curves': 'true'}  # the last thing that a run does


def _held(tmp_path, where, **changes):
  """Starts a training that stops at a position; returns when it is there."""
  _, _, _, *flags = cli.train_command(tmp_path / 'run', **changes)
  process = cli.start(
    [sys.executable, '-c', HOLD, where, str(tmp_path), *flags]
  )
  cli.wait_until((tmp_path / 'there').exists, process)
  return process


@pytest.mark.slow
@pytest.mark.parametrize(
  'where, number',
  [
    ('orbax.checkpoint', signal.SIGTERM),
    *further(['jax', signal.SIGINT]),
  ],
)
def test_a_signal_during_imports_ends_with_42(tmp_path, where, number):
  """There is one message, without a traceback of the import."""
  process = _held(tmp_path, where)
  process.send_signal(number)
  injected(f'{number.name} at import')
  _, err = cli.finish(process, code=42)
  assert err == f'interrupted by {number.name}; nothing had to be saved\n'
  assert not (tmp_path / 'run').exists()


@pytest.mark.long
def test_a_signal_after_the_end_keeps_the_exit_code(tmp_path):
  process = _held(tmp_path, 'the end', **SHORT)
  process.send_signal(signal.SIGHUP)
  injected('SIGHUP after the end')
  deadline = time.monotonic() + 60
  lines = []
  while not lines or 'the run has ended' not in lines[-1]:
    assert time.monotonic() < deadline and process.stderr is not None
    lines.append(process.stderr.readline())
  (tmp_path / 'go').touch()
  _, err = cli.finish(process, code=0)
  assert 'Traceback' not in err


def test_a_signal_that_was_ignored_at_the_start_stays_ignored():
  """As SIGHUP after nohup, and SIGINT of a script's background processes."""
  code = """
import os, signal, threading
from vit_jax.processes.interruption import HANDLER
received, arrived = [], threading.Event()
HANDLER.react = lambda number: (received.append(number), arrived.set())
signal.signal(signal.SIGHUP, signal.SIG_IGN)
HANDLER.install()
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGTERM)
assert arrived.wait(60) and received == [signal.SIGTERM]
HANDLER.release()
os.kill(os.getpid(), signal.SIGHUP)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60)


@pytest.mark.parametrize('stopped_by_peer', [False, True])
def test_a_signal_counts_as_repeated_only_after_a_pause(
  monkeypatch, stopped_by_peer
):
  """Signals that arrive together are one request to stop, also of a peer."""
  timer, leave, service = mock.Mock(), mock.Mock(), mock.Mock()
  service.key_value_dir_get.return_value = [('0', '7')]  # counts of calls
  monkeypatch.setattr(preemption.threading, 'Timer', timer)
  monkeypatch.setattr(preemption.os, '_exit', leave)
  if stopped_by_peer:
    monkeypatch.setattr(peers, 'client', lambda: service)
  stop = preemption.Preemption()
  try:
    if stopped_by_peer:
      peers.LISTENER.on_stop()
      assert [stop.reached() for _ in range(8)] == [False] * 7 + [True]
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
      HANDLER.react(number)
    assert stop.reached() and not leave.called
    [(_, offer_exit)] = (call.args for call in timer.call_args_list)
    offer_exit()
    HANDLER.react(signal.SIGINT)
    leave.assert_called_once_with(128 + signal.SIGINT)
  finally:
    stop.close()
    peers.LISTENER.on_stop = None


def test_a_forked_worker_ends_at_a_signal():
  """It does not report its signals to the process it was forked from."""
  code = """
import os, signal, sys, time
from vit_jax.processes.interruption import HANDLER
HANDLER.install()
HANDLER.react = lambda number: os._exit(99)
ready, say = os.pipe()
child = os.fork()
if not child:
  os.write(say, b'.')
  time.sleep(60)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
status = os.waitpid(child, 0)[1]
time.sleep(0.2)
sys.exit(0 if os.WTERMSIG(status) == signal.SIGTERM else 1)
"""
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
