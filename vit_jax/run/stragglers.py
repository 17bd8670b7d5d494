"""Finds slow hosts: measures each host's own time and compares all of them.

All hosts of a run finish a step at the same time, so step times do not differ
between them. A host's own time does: the part of a step in which it waits for
data or runs Python code, and not for its devices. All other hosts wait for it
in the meantime.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.run.ledger import Ledger

log = logging.getLogger('vit_jax')
# A host is slow if its own time is at least _FACTOR times that of the median
# host, and the difference is at least _FRACTION of a step's time.
_FACTOR = 2.0
_FRACTION = 0.1


def slow_hosts(own_s: Sequence[float], step_s: float) -> list[int]:
  """Returns the processes whose own time per step stands out.

  Args:
    own_s: seconds per step not spent waiting for devices, by process index.
    step_s: seconds per step.

  Returns:
    Indices of the processes whose own time is at least twice that of the
    median process and a tenth of a step longer, the slowest first.
  """
  middle = statistics.median_low(own_s)
  slow = [
    i
    for i, own in enumerate(own_s)
    if own >= _FACTOR * middle and own - middle >= _FRACTION * step_s
  ]
  return sorted(slow, key=lambda i: -own_s[i])


class HostTimes:
  """Measures this process, and periodically compares all processes."""

  def __init__(self, ledger: Ledger, every_steps: int):
    """Starts measuring.

    Args:
      ledger: account of time, whose spans other than data_wait are subtracted
        from the time of steps; destination of the event `slow_hosts`.
      every_steps: interval between two comparisons; 0 for none.
    """
    self._ledger, self._every_steps = ledger, every_steps
    self._active = every_steps > 0 and jax.process_count() > 1
    self._reset()

  def _reset(self) -> None:
    self._start, self._steps = time.perf_counter(), 0
    self._waited_s, self._paused_s = 0.0, self._pauses()

  def _pauses(self) -> float:
    totals = self._ledger.totals
    return sum(s for kind, s in totals.items() if kind != 'data_wait')

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Surrounds code in which this process waits for its devices."""
    start = time.perf_counter()
    yield
    self._waited_s += time.perf_counter() - start

  def step(self, step: int) -> None:
    """Counts a step, and compares the processes if that is due.

    All processes must call it after every step.

    Args:
      step: number of updates completed.
    """
    self._steps += 1
    if not self._active or step % self._every_steps:
      return
    elapsed = time.perf_counter() - self._start
    elapsed -= self._pauses() - self._paused_s
    mine = [(elapsed - self._waited_s) / self._steps, elapsed / self._steps]
    every = multihost_utils.process_allgather(np.array(mine, np.float32))
    self._reset()
    own, steps = every[:, 0].tolist(), every[:, 1].tolist()
    slow = slow_hosts(own, statistics.median_low(steps))
    if slow and jax.process_index() == 0:
      named = [f'process {i} ({1000 * own[i]:.0f} ms a step)' for i in slow]
      log.warning(
        'slow host(s) up to step %d: %s for data and work on the host; the '
        'median process takes %.0f ms of the %.0f ms of a step',
        step,
        ', '.join(named),
        1000 * statistics.median_low(own),
        1000 * statistics.median_low(steps),
      )
      self._ledger.event('slow_hosts', step=step, processes=slow, own_s=own)
