"""Ends a process when the process that started it is killed.

A run that outlived its sweep would hold the lock of its workdir, and the next
sweep could not continue it. The kernel sends SIGTERM instead, on which a run
saves its state. Only Linux has this.
"""

import ctypes
import os
import signal

VARIABLE = 'VIT_JAX_PARENT'  # process id of the sweep or study
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
  """Asks the kernel to send SIGTERM when the parent that set VARIABLE ends."""
  parent = os.environ.pop(VARIABLE, '')
  if not parent:
    return
  prctl = getattr(ctypes.CDLL(None), 'prctl', None)
  if prctl is None:
    return
  prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != int(parent):  # it was killed before the request
    os.kill(os.getpid(), signal.SIGTERM)
