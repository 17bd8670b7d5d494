"""Checks that the system allows the threads and the memory that a run needs.

Below these limits, libraries may wait forever for a thread that could not be
started, instead of raising an error.
"""

import contextlib
import ctypes
import pathlib
import resource
import signal
import threading

from vit_jax.errors import UserError

_THREADS = 64  # a small run on CPUs has about 100, some of which already exist
_ADDRESS_BYTES = 2 * 2**30  # a small run on CPUs reserves 2.4 GiB
_EXIT_S = 50  # time for the interpreter to exit


def check() -> None:
  """Checks that threads and address space are available.

  Raises:
    UserError: a limit of the system is too low.
  """
  limit = resource.getrlimit(resource.RLIMIT_AS)[0]
  if limit != resource.RLIM_INFINITY and limit < _reserved() + _ADDRESS_BYTES:
    raise UserError(
      f'the address space of this process is limited to {limit >> 20} MiB '
      f'(ulimit -v), of which {_reserved() >> 20} MiB are used; a run needs at '
      f'least {_ADDRESS_BYTES >> 20} MiB more: use `ulimit -v unlimited`.'
    )
  ended = threading.Event()
  threads = []
  try:
    for _ in range(_THREADS):
      threads.append(threading.Thread(target=ended.wait, daemon=True))
      threads[-1].start()
  except RuntimeError as error:
    raise UserError(
      f'only {len(threads) - 1} of {_THREADS} threads could be started '
      f'({error}). The limits are {_thread_limits()}: raise them (ulimit -u, '
      'or the number of processes of the container).'
    ) from error
  finally:
    ended.set()


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


def _reserved() -> int:
  """Returns the bytes of address space in use; 0 if unknown."""
  try:
    pages = pathlib.Path('/proc/self/statm').read_text().split()[0]
  except OSError:
    return 0
  return int(pages) * resource.getpagesize()


def _thread_limits() -> str:
  """Describes the limits of the user and the container for messages."""
  found = [f'ulimit -u: {resource.getrlimit(resource.RLIMIT_NPROC)[0]}']
  for path in ('/sys/fs/cgroup/pids.max', '/sys/fs/cgroup/pids/pids.max'):
    with contextlib.suppress(OSError):
      found.append(f'{path}: {pathlib.Path(path).read_text().strip()}')
  return ', '.join(found)
