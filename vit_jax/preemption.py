"""SIGTERM or SIGINT to any process: all stop at one step, saved.

With one process the signal sets a flag. With several, JAX's coordination
service receives SIGTERM and makes all processes agree on the step; a handler of
Python's own would disable that, so SIGINT is turned into SIGTERM there.
"""

import logging
import os
import signal
import types

import jax
from jax.experimental import multihost_utils

log = logging.getLogger('vit_jax')
EXIT_PREEMPTED = 42


class StopRequested(Exception):  # noqa: N818 (nothing went wrong)
  """All processes have agreed to stop; what is going on is to be left."""


class Preemption:
  """Notices that the run is to end; install it once, before the loop."""

  def __init__(self):
    self._signal: int | None = None
    self._agreed = False
    self._asked = 0
    self._alone = jax.process_count() == 1
    self._before = {
      number: signal.signal(number, self._handle)
      for number in (
        (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,)
      )
    }

  def reached(self) -> bool:
    """Whether all processes stop here.

    They agree on one of these calls, so all must make the same ones: at every
    step, and at every batch of an evaluation. Once True it stays True.
    """
    if self._alone or self._agreed:
      return self._signal is not None
    self._asked += 1
    if not multihost_utils.reached_preemption_sync_point(self._asked):
      return False
    # Agreed: from here on a signal is a second one.
    self._agreed, self._signal = True, signal.SIGTERM
    signal.signal(signal.SIGTERM, self._handle)
    return True

  def check(self) -> None:
    """Raises StopRequested where `reached` is True."""
    if self.reached():
      raise StopRequested

  def close(self) -> None:
    """Restores the handlers that were there."""
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    name = signal.Signals(number).name
    if self._signal is not None:
      log.warning('%s again: exiting at once, nothing more is saved', name)
      os._exit(128 + number)
    self._signal = number
    log.warning('%s: stopping and saving; again to exit at once', name)
    if not self._alone:
      os.kill(os.getpid(), signal.SIGTERM)
