"""Bounds the life of a process: by its parent, and by the time of its exit."""

import contextlib
import ctypes
import os
import signal

VARIABLE = 'VIT_JAX_PARENT'  # process id of the sweep or study
_PR_SET_PDEATHSIG = 1
_EXIT_S = 50  # time for the interpreter to exit


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


class _SignalEvent(ctypes.Structure):
  """C's `struct sigevent` for a timer that sends a signal (SIGEV_SIGNAL)."""

  _fields_ = (
    ('value', ctypes.c_void_p),
    ('signal', ctypes.c_int),
    ('notify', ctypes.c_int),
    ('unused', ctypes.c_char * 48),
  )


def bound_exit(code: int) -> None:
  """Ends the process if the interpreter does not exit in time.

  Threads that hang would otherwise keep the process alive. Starting another
  thread to end it may be impossible, and Python code no longer runs while the
  interpreter exits. So a timer sends the signal whose number is the exit code,
  and the signal's handler is C's `_exit`, whose argument is this number.

  Args:
    code: exit code of the process; without timers or such a signal, SIGALRM
      ends the process.
  """
  with contextlib.suppress(ValueError):  # not the main thread
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_S + 5)
  # macOS has no timer_create; some codes are not the number of a signal.
  with contextlib.suppress(AttributeError, ValueError, OSError):
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    event = _SignalEvent(signal=code, notify=0)
    # At exit, Python resets the signals that have handlers of its own.
    signal.signal(code, signal.SIG_DFL)
    libc.signal(code, libc._exit)
    # CLOCK_MONOTONIC; interval and start, each in seconds and nanoseconds.
    libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer))
    times = (ctypes.c_long * 4)(0, 0, _EXIT_S, 0)
    libc.timer_settime(timer, 0, times, None)
