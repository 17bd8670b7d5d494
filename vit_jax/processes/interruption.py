"""Handles SIGTERM, SIGINT and SIGHUP during a whole command.

A thread reads the numbers of signals that arrive, so that a signal is noticed
at once even while the main thread compiles or makes another long call. Until a
run takes over (`preemption`), there is nothing to save, and a signal ends the
process with exit code 42.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

from vit_jax.errors import EXIT_PREEMPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Reaction = Callable[[int], None]


def leave_early(number: int) -> None:
  """Ends the process; the reaction while there is nothing to save."""
  print(early_message(number), file=sys.stderr, flush=True)
  os._exit(EXIT_PREEMPTED)


def early_message(number: int) -> str:
  """Returns the message of a process that has nothing to save.

  Args:
    number: number of the signal.
  """
  name = signal.Signals(number).name
  return (
    f'preempted: {name} before the first step; nothing is lost, the same '
    'command starts again'
  )


class Interruptions:
  """Reaction of this process to signals; the only instance is `HERE`.

  Attributes:
    react: function that is called in a thread with the number of each signal.
  """

  def __init__(self):
    self.react: Reaction = leave_early
    self._pipe: tuple[int, int] | None = None

  def install(self) -> None:
    """Installs the handlers; must be called from the main thread."""
    if self._pipe is None:
      self._pipe = os.pipe()
      for end in self._pipe:
        os.set_blocking(end, end == self._pipe[0])
      os.register_at_fork(after_in_child=self._forked)
      thread = threading.Thread(
        target=self._listen, daemon=True, name='signals'
      )
      thread.start()
    signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
    for number in SIGNALS:
      signal.signal(number, _noticed_by_the_thread)

  def release(self) -> None:
    """Restores Python's default handlers."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, signal.SIG_DFL)

  def ignore(self) -> None:
    """Ignores signals, so that they cannot change a command's exit code."""
    for number in SIGNALS:
      signal.signal(number, signal.SIG_IGN)

  @property
  def installed(self) -> bool:
    """Returns whether the handlers are installed."""
    return signal.getsignal(signal.SIGTERM) is _noticed_by_the_thread

  def _forked(self) -> None:
    if self.installed:
      self.release()  # worker processes have the usual handlers

  def _listen(self) -> None:
    assert self._pipe is not None
    while True:
      for number in os.read(self._pipe[0], 64):
        if number in SIGNALS:
          self.react(number)


def _noticed_by_the_thread(number: int, frame: object) -> None:
  """Does nothing; without a handler, a signal would end the process."""


HERE = Interruptions()
