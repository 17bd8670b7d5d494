"""Stops all processes at the same step after a signal to any of them.

Each process counts its calls of `reached`. When one of them gets a signal, all
publish their counts, and stop at the call after the highest count.

JAX has a similar agreement, but Orbax uses the same counter when it saves.
Presumably for that reason, 1 of 23 signals during evaluations had no effect
when JAX's agreement was used.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

from vit_jax.processes import interruption, peers
from vit_jax.processes.interruption import HANDLER

log = logging.getLogger('vit_jax')
_AGREE_S = 120  # time limit for all processes to publish their counts
# All signals in this time after the first one are one request, because GNU
# timeout, SLURM and container runtimes send each to a process and to its group.
_ONE_REQUEST_S = 2.0
# Keys of JAX's key-value store: counts by process, and the barrier after them.
_COUNTS, _AGREED = 'vit_jax/counts/', 'vit_jax/agreed'


class StopRequested(Exception):  # noqa: N818 (nothing went wrong)
  """All processes have agreed to stop; the current work must be abandoned."""


class Preemption:
  """Handles the signals during a run; created once, before the loop."""

  def __init__(self):
    self._signal: int | None = None
    self._may_exit = False  # whether another signal ends the process at once
    self._is_single = peers.client() is None
    self._calls, self._stop_at = 0, None  # both are counts of calls
    self._counting = threading.Lock()
    self._is_over = False
    # In a program other than vit_jax's commands, no handler is installed yet.
    # This object then installs it, and restores the default at the end.
    self._is_installer = not HANDLER.installed
    if self._is_installer:
      HANDLER.install()
    self._earlier_reaction = HANDLER.react
    HANDLER.react = self._react
    if not self._is_single:
      peers.LISTENER.on_stop = self._agree

  def reached(self) -> bool:
    """Returns whether all processes stop now.

    The processes agree on the number of a call of this function, so all of them
    must call it equally often: after every step, and at every batch of an
    evaluation. Once it has returned True, it always does.
    """
    if self._is_single:
      return self._signal is not None
    with self._counting:
      self._calls += 1
      return self._stop_at is not None and self._calls >= self._stop_at

  def check(self) -> None:
    """Raises StopRequested if `reached` returns True."""
    if self.reached():
      raise StopRequested

  @contextlib.contextmanager
  def nothing_to_save(self) -> Iterator[None]:
    """Lets signals end the process at once, during work before the first step.

    Such work may hang, and does not call `reached`. In a program other than
    vit_jax's commands this changes nothing, because a signal to the run must
    not end that program.
    """
    if not self._is_installer:
      HANDLER.react = self._earlier_reaction
    try:
      yield
    finally:
      HANDLER.react = self._react

  def close(self) -> None:
    """Ends the handling of signals by this run.

    A command keeps its own handler, so that a later signal is logged.
    """
    self._is_over = True
    if self._is_installer:
      HANDLER.release()
      HANDLER.react = interruption.exit_early

  def _react(self, number: int) -> None:
    """Reacts to a signal; runs in the thread that reads signals."""
    name = signal.Signals(number).name
    if self._may_exit:
      log.warning('%s again: exiting at once without saving', name)
      os._exit(128 + number)
    if self._signal is not None:
      return
    self._signal = number
    action = 'the run has ended' if self._is_over else 'stopping and saving'
    log.warning('%s: %s', name, action)
    offer = threading.Timer(_ONE_REQUEST_S, self._offer_exit)
    offer.daemon = True
    offer.start()
    if not self._is_single and not self._is_over:
      peers.publish_stop()

  def _offer_exit(self) -> None:
    """Lets the next signal end the process at once."""
    self._may_exit = True
    log.warning('send the signal again to exit at once without saving')

  def _agree(self) -> None:
    """Agrees on the call to stop at; runs in the thread that polls messages."""
    service = peers.client()
    # `reached` waits for the lock, so no count changes until all are published.
    with self._counting:
      service.key_value_set(f'{_COUNTS}{peers.index()}', str(self._calls))
      service.wait_at_barrier(_AGREED, _AGREE_S * 1000)
      counts = service.key_value_dir_get(_COUNTS)
      self._stop_at = 1 + max(int(count) for _, count in counts)
