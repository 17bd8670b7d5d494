"""Tests of commands whose output cannot be written."""

import os
import subprocess
import sys

import pytest

from tests.faults.counts import further
from vit_jax.errors import EXIT_CRASH, EXIT_PREEMPTED, EXIT_USER_ERROR

# Prints some characters, and ends as its second argument says.
PRINTING = """
import sys, os, signal, time
from vit_jax import errors
from vit_jax.cli import process
from vit_jax.processes import interruption
def body(arguments):
  print('x' * int(arguments[0]))
  if arguments[1] == 'error':
    raise errors.UserError('broken')
  if arguments[1] == 'signal':
    interruption.HANDLER.install()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
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
@pytest.mark.parametrize('is_pipe', [False, *further(True)])
# Less than a buffer, and more
@pytest.mark.parametrize('number', [1, *further(100_000)])
def test_an_output_that_cannot_be_written_is_one_message(is_pipe, number):
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
@pytest.mark.parametrize(
  'end, code',
  [('signal', EXIT_PREEMPTED), *further(['error', EXIT_USER_ERROR])],
)
def test_a_full_disk_of_the_log_does_not_change_the_exit_code(end, code):
  """Launchers would start a command with a wrong flag again."""
  with open('/dev/full', 'w') as full:
    for output in (subprocess.PIPE, full):
      done = _run(1, end, stdout=output, stderr=full)
      assert done.returncode == code
