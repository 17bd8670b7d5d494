"""Stops all processes at the same step after a signal to any of them.

With several processes, each counts its calls of `reached`. When one of them
gets a signal, each publishes its count and waits for those of the others; all
stop at the call after the highest count. (JAX's own agreement has one counter
per process, which Orbax also uses when it saves; with it, 1 of 23 signals
during evaluations had no effect. That this was the cause is an assumption.)
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.processes import interruption, peers
from vit_jax.processes.interruption import HERE

log = logging.getLogger('vit_jax')
__all__ = ('EXIT_PREEMPTED', 'Preemption', 'StopRequested')
_AGREE_S = 120  # time limit for all processes to publish their counts
_ASKED, _AGREED = 'vit_jax/asked/', 'vit_jax/agreed'


class StopRequested(Exception):  # noqa: N818 (nothing went wrong)
  """All processes have agreed to stop; the current work must be abandoned."""


class Preemption:
  """Notices signals that ask the run to end; created once, before the loop."""

  def __init__(self):
    self._signal: int | None = None
    self._alone = peers.client() is None
    self._asked, self._stop_at = 0, None
    self._counting = threading.Lock()
    self._is_over = False
    self._took = not HERE.installed
    if self._took:  # not within one of the commands
      HERE.install()
    self._earlier = HERE.react
    HERE.react = self._react
    if not self._alone:
      peers.on_stop(self._agree)

  def reached(self) -> bool:
    """Returns whether all processes stop here.

    They agree on one of these calls, so all must make the same calls: one at
    every step, and one at every batch of an evaluation. Once True, it stays
    True.
    """
    if self._alone:
      return self._signal is not None
    with self._counting:
      self._asked += 1
      return self._stop_at is not None and self._asked >= self._stop_at

  def check(self) -> None:
    """Raises StopRequested where `reached` is True."""
    if self.reached():
      raise StopRequested

  @contextlib.contextmanager
  def nothing_to_save(self) -> Iterator[None]:
    """Surrounds work before the first step: a signal ends the process at once.

    Such work may never end, and would then never look whether a signal came.
    Within a program that is not one of the commands nothing changes, because
    the end of a run must not end that program.
    """
    if not self._took:
      HERE.react = self._earlier
    try:
      yield
    finally:
      HERE.react = self._react

  def close(self) -> None:
    """Ends the reaction to signals, because the run has ended."""
    self._is_over = True
    if self._took:
      HERE.release()
      HERE.react = interruption.leave_early

  def _react(self, number: int) -> None:
    """Reacts to a signal; runs in the thread that reads signals."""
    name = signal.Signals(number).name
    if self._signal is not None:
      log.warning('%s again: exiting at once, nothing more is saved', name)
      os._exit(128 + number)
    self._signal = number
    if self._is_over:
      log.warning('%s: the run has ended; repeat it to exit at once', name)
      return
    log.warning('%s: stopping and saving; repeat it to exit at once', name)
    if not self._alone:
      peers.say_stop()

  def _agree(self) -> None:
    """Agrees on a call; runs in the thread that listens to other processes."""
    service = peers.client()
    # `reached` waits for the lock, so no count changes until all are known.
    with self._counting:
      service.key_value_set(f'{_ASKED}{peers.index()}', str(self._asked))
      service.wait_at_barrier(_AGREED, _AGREE_S * 1000)
      counts = service.key_value_dir_get(_ASKED)
      self._stop_at = 1 + max(int(count) for _, count in counts)
    self._signal = self._signal or signal.SIGTERM
