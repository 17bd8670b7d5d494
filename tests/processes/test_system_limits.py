"""Tests of low limits of threads and memory, and of threads that hang."""

import shlex
import subprocess
import sys
import threading

import pytest

from tests.faults.counts import further
from vit_jax.errors import UserError
from vit_jax.processes import machine

HANGING = """
import ctypes, sys, threading
from vit_jax import errors
from vit_jax.cli import process
from vit_jax.processes import interruption
interruption._EXIT_S = 1
def body(arguments):
  if sys.argv[1] == 'thread':
    threading.Thread(target=threading.Event().wait).start()
  else:  # after the interpreter has ended
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)
  raise eval(sys.argv[2])('broken')
process.run(body, lambda: None)
"""


def test_too_few_threads_are_one_message(monkeypatch):
  """The threads that were started end."""
  start, started = threading.Thread.start, []

  def refused(self):
    if len(started) == 5:
      raise RuntimeError("can't start new thread")
    started.append(self)
    start(self)

  monkeypatch.setattr(threading.Thread, 'start', refused)
  with pytest.raises(UserError, match='only 5 of 64 threads.*ulimit -u'):
    machine.check_limits()
  for thread in started:
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.slow
def test_too_little_address_space_is_one_message():
  """The command ends with 2, and does not hang."""
  command = (
    f'ulimit -v 2600000; exec {shlex.quote(sys.executable)} -m vit_jax.train '
    '--config=configs/quickstart.py --workdir=unused'
  )
  ended = subprocess.run(
    ['bash', '-c', command], capture_output=True, text=True, timeout=120
  )
  assert ended.returncode == 2, ended.stderr
  assert 'ulimit -v' in ended.stderr and 'Traceback' not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize('hanging', ['thread', *further('exit')])
@pytest.mark.parametrize(
  'error, code',
  [
    ('ValueError', 1),
    *further(
      ['errors.PreemptedError', 42],
      ['errors.UserError', 2],
      ['errors.DivergedError', 43],
    ),
  ],
)
def test_a_process_that_hangs_keeps_its_exit_code(hanging, error, code):
  """After the message, the process ends within the bound."""
  ended = subprocess.run(
    [sys.executable, '-c', HANGING, hanging, error],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert ended.returncode == code, ended.stderr
  assert 'broken' in ended.stderr
