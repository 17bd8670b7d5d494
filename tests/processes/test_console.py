"""Tests of outputs that cannot be written, and of threads that hang."""

import os
import subprocess
import sys

import pytest

from tests.faults.counts import further
from vit_jax.errors import EXIT_CRASH, EXIT_DIVERGED, EXIT_PREEMPTED

# Prints some characters, and ends as its second argument says.
PRINTING = """
import ctypes, os, signal, sys, threading, time
from vit_jax import errors
from vit_jax.cli import process
from vit_jax.processes import interruption
interruption._EXIT_S = 1
def body(arguments):
  print('x' * int(arguments[0]))
  if arguments[1] == 'signal':
    interruption.HANDLER.install()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
  if arguments[1] == 'thread':
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError('broken')
  if arguments[1] == 'exit':  # after the interpreter has ended
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)
    raise errors.DivergedError('broken')
process.run(body, lambda: None)
"""


def _run(number, end, **files):
  return subprocess.run(
    [sys.executable, '-c', PRINTING, str(number), end],
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONUNBUFFERED': ''},
    timeout=120,
    text=True,
    **files,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'number, is_pipe',
  [(1, False), *further([100_000, True])],  # less than a buffer, and more
)
def test_an_output_that_cannot_be_written_is_one_message(number, is_pipe):
  """A full disk, and a pipe whose reader has ended, as in `| head`."""
  with open('/dev/full', 'w') as full:
    reader, writer = os.pipe()
    os.close(reader)
    output = writer if is_pipe else full
    done = _run(number, '', stdout=output, stderr=subprocess.PIPE)
    os.close(writer)
  assert done.returncode == EXIT_CRASH
  assert 'the output cannot be written' in done.stderr
  assert done.stderr.count('\n') == 1


@pytest.mark.slow
def test_a_full_disk_of_the_log_does_not_change_the_exit_code():
  """Launchers would start a command with a wrong flag again."""
  with open('/dev/full', 'w') as full:
    for output in (subprocess.PIPE, full):
      done = _run(1, 'signal', stdout=output, stderr=full)
      assert done.returncode == EXIT_PREEMPTED


@pytest.mark.slow
@pytest.mark.parametrize(
  'end, code', [('thread', EXIT_CRASH), *further(['exit', EXIT_DIVERGED])]
)
def test_a_process_that_hangs_keeps_its_exit_code(end, code):
  """After the message, the process ends within the bound."""
  done = _run(1, end, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert done.returncode == code, done.stderr
  assert 'broken' in done.stderr
