"""Tests of signals before the first step of a run, and after its last."""

import signal
import subprocess
import sys
import time

import pytest

from tests import cli
from tests.faults.counts import further, injected

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
  'number', [signal.SIGTERM, *further(signal.SIGINT, signal.SIGHUP)]
)
@pytest.mark.parametrize('where', ['orbax.checkpoint', *further('jax')])
def test_a_signal_during_imports_ends_with_42(tmp_path, number, where):
  """There is one message, without a traceback of the import."""
  process = _held(tmp_path, where)
  process.send_signal(number)
  injected(f'{number.name} at import')
  _, err = cli.finish(process, code=42)
  assert f'preempted: {number.name} before the first step' in err
  assert 'Traceback' not in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, *further(signal.SIGHUP)])
def test_a_signal_after_the_end_keeps_the_exit_code(tmp_path, number):
  process = _held(tmp_path, 'the end', **SHORT)
  process.send_signal(number)
  injected(f'{number.name} after the end')
  deadline = time.monotonic() + 60
  lines = []
  while not lines or 'the run has ended' not in lines[-1]:
    assert time.monotonic() < deadline and process.stderr is not None
    lines.append(process.stderr.readline())
  (tmp_path / 'go').touch()
  _, err = cli.finish(process, code=0)
  assert 'Traceback' not in err


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
