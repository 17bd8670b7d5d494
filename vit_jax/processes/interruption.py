"""Handles signals during a whole command, and ends processes that remain.

A thread reads the numbers of SIGTERM, SIGINT and SIGHUP when they arrive, so it
reacts at once even while the main thread compiles or is in another long call.
As long as there is nothing to save, a signal ends the process with exit code
42. A run installs another reaction (`preemption`). A signal that was ignored
when the process started, such as SIGHUP after `nohup`, stays ignored.

Other functions end a process after its parent (`end_with_parent`,
`end_worker_with_parent`), or if it does not exit by itself (`bound_exit`).
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable

from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.processes import console

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Reaction = Callable[[int], None]
# Variable with the process id of the sweep or study that starts a run.
PARENT_VARIABLE = 'VIT_JAX_PARENT'
_PR_SET_PDEATHSIG = 1  # option of prctl: signal at the end of the parent
_EXIT_S = 50  # time for the interpreter to exit


def exit_early(number: int) -> None:
  """Ends the process with code 42; the default reaction to a signal."""
  console.print_error(early_exit_message(number))
  os._exit(EXIT_PREEMPTED)


def early_exit_message(number: int) -> str:
  """Returns the message for a signal that arrives while nothing must be saved.

  Args:
    number: number of the signal.
  """
  name = signal.Signals(number).name
  return f'interrupted by {name}; nothing had to be saved'


class SignalHandler:
  """Handles the signals of this process; the only instance is `HANDLER`.

  Attributes:
    react: function that is called, in a thread, with the number of each signal.
  """

  def __init__(self):
    self.react: Reaction = exit_early
    self._pipe: tuple[int, int] | None = None

  def install(self) -> None:
    """Installs the handlers; must be called from the main thread."""
    if self._pipe is None:
      self._pipe = reader, writer = os.pipe()
      os.set_blocking(reader, True)
      os.set_blocking(writer, False)  # as `set_wakeup_fd` requires
      os.register_at_fork(after_in_child=self._forked)
      thread = threading.Thread(
        target=self._listen, daemon=True, name='signals'
      )
      thread.start()
    # Python writes the number of each signal to the pipe.
    signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
    for number in SIGNALS:
      is_ignored = signal.getsignal(number) is signal.SIG_IGN
      # Set in both cases, because JAX may have replaced the handler of SIGTERM.
      signal.signal(number, signal.SIG_IGN if is_ignored else _do_nothing)

  def release(self) -> None:
    """Restores Python's default handlers of the signals that are handled."""
    signal.set_wakeup_fd(-1)
    for number in filter(_is_handled, SIGNALS):
      is_interrupt = number == signal.SIGINT
      default = signal.default_int_handler if is_interrupt else signal.SIG_DFL
      signal.signal(number, default)

  def ignore(self) -> None:
    """Ignores signals from now on, so that they cannot change an exit code."""
    for number in SIGNALS:
      signal.signal(number, signal.SIG_IGN)

  @property
  def installed(self) -> bool:
    """Returns whether the handlers are installed."""
    return any(map(_is_handled, SIGNALS))

  def _forked(self) -> None:
    """Restores the default handlers in a forked worker process."""
    if self.installed:
      self.release()

  def _listen(self) -> None:
    """Reads the numbers of signals, and reacts; runs in a thread."""
    assert self._pipe is not None
    while True:
      for number in os.read(self._pipe[0], 64):
        if number in SIGNALS:
          self.react(number)


def _do_nothing(number: int, frame: object) -> None:
  """Does nothing, because the thread reads the signal.

  Without a Python handler, the signal would end the process.
  """


def _is_handled(number: int) -> bool:
  """Returns whether the thread reads a signal."""
  return signal.getsignal(number) is _do_nothing


HANDLER = SignalHandler()


def end_with_parent() -> None:
  """Asks the kernel to send SIGTERM when the sweep or study ends.

  It does nothing in a process that neither of them has started.
  """
  parent = os.environ.pop(PARENT_VARIABLE, '')
  if not parent:
    return
  prctl = getattr(ctypes.CDLL(None), 'prctl', None)
  if prctl is None:  # only Linux has it
    return
  prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != int(parent):  # the parent ended before the request
    os.kill(os.getpid(), signal.SIGTERM)


def end_worker_with_parent() -> None:
  """Lets a process of a pool end when its parent ends for any reason.

  The workers of a pool wait for tasks on a pipe that the other workers keep
  open. If the parent were killed, they would otherwise wait forever.
  """
  parent = multiprocessing.parent_process()
  assert parent is not None

  def watch() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


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
