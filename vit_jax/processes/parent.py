"""Ends a process when the process that started it is killed.

If a sweep is killed and one of its runs continues, the run keeps the lock of
its workdir, and the next sweep cannot resume it. Therefore the kernel is asked
to send SIGTERM to the run, which then saves its state. Only Linux supports
this.
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
  if os.getppid() != int(parent):  # the parent ended before the request
    os.kill(os.getpid(), signal.SIGTERM)
