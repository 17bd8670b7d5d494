"""Tests of low limits of threads and memory, and of threads that hang."""

import shlex
import signal
import subprocess
import sys
import threading

import pytest

from vit_jax.errors import UserError
from vit_jax.processes import limits

HANGING = """
import sys, threading
from absl import app
from vit_jax.cli import process
from vit_jax.processes import limits
limits._EXIT_S = 1
def body(arguments):
  threading.Thread(target=threading.Event().wait).start()
  raise ValueError('broken')
process.run(body, lambda: None)
"""


def test_the_limits_of_this_machine_suffice():
  before = threading.active_count()
  limits.check()
  assert threading.active_count() <= before + limits._THREADS


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
    limits.check()
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
def test_a_thread_that_hangs_does_not_keep_the_process():
  """After the traceback, the process ends within the bound."""
  ended = subprocess.run(
    [sys.executable, '-c', HANGING], capture_output=True, text=True, timeout=60
  )
  assert ended.returncode == -signal.SIGALRM
  assert 'ValueError: broken' in ended.stderr
