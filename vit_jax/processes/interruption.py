"""SIGTERM, SIGINT and SIGHUP, from a command's first import to its last line.

A thread reads the numbers of signals that came, so that one is noticed at once
while the main thread is within a compilation or another long call. Until a run
takes over (`preemption`), nothing has been done that could be lost, and a
signal ends the process with exit code 42.
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
  """The reaction while there is nothing to save."""
  print(early_message(number), file=sys.stderr, flush=True)
  os._exit(EXIT_PREEMPTED)


def early_message(number: int) -> str:
  """What a process says that has nothing to save."""
  name = signal.Signals(number).name
  return (
    f'preempted: {name} before the first step; nothing is lost, the same '
    'command starts again'
  )


class Interruptions:
  """What this process does about signals; there is one, `HERE`.

  Attributes:
    react: called in a thread with the number of each signal.
  """

  def __init__(self):
    self.react: Reaction = leave_early
    self._pipe: tuple[int, int] | None = None

  def install(self) -> None:
    """Takes the signals; must be called from the main thread."""
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
    """Gives the signals back to Python's defaults."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, signal.SIG_DFL)

  def ignore(self) -> None:
    """At the end of a command: whatever comes, its exit code stands."""
    for number in SIGNALS:
      signal.signal(number, signal.SIG_IGN)

  @property
  def installed(self) -> bool:
    """Whether signals come here."""
    return signal.getsignal(signal.SIGTERM) is _noticed_by_the_thread

  def _forked(self) -> None:
    if self.installed:
      self.release()  # a worker process ends as others do

  def _listen(self) -> None:
    assert self._pipe is not None
    while True:
      for number in os.read(self._pipe[0], 64):
        if number in SIGNALS:
          self.react(number)


def _noticed_by_the_thread(number: int, frame: object) -> None:
  """Signals need some handler, or they would end the process."""


HERE = Interruptions()
