"""Measures the steps of a run: slow hosts, and traces by JAX's profiler.

All hosts of a run finish a step at the same time, so their step times do not
differ. The host time is the part of a step in which a process waits for data or
runs Python code, and does not wait for its devices. During that time, the
devices of all other hosts wait for this process.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.run.ledger import Ledger

log = logging.getLogger('vit_jax')
# A host is slow if its host time is at least _FACTOR times the median of all
# hosts, and the difference is at least _FRACTION of a step's time.
_FACTOR = 2.0
_FRACTION = 0.1


def slow_hosts(host_s: Sequence[float], step_s: float) -> list[int]:
  """Returns the processes whose host time is much longer than the median.

  Args:
    host_s: seconds per step not spent waiting for devices, by process index.
    step_s: seconds per step.

  Returns:
    Indices of the processes whose host time is at least twice the median, and
    at least a tenth of a step longer than it.
  """
  median = statistics.median_low(host_s)
  return [
    i
    for i, seconds in enumerate(host_s)
    if seconds >= _FACTOR * median and seconds - median >= _FRACTION * step_s
  ]


class HostTimes:
  """Measures the host time of this process, and compares all processes."""

  def __init__(self, ledger: Ledger, every_steps: int):
    """Starts measuring.

    Args:
      ledger: account of time; also the destination of the event `slow_hosts`.
      every_steps: interval between two comparisons; 0 for none.
    """
    self._ledger = ledger
    self._every_steps = every_steps if jax.process_count() > 1 else 0
    self._start_interval()

  def _start_interval(self) -> None:
    """Starts the interval up to the next comparison."""
    self._start = self._ledger.steps_s()
    self._steps, self._waited_s = 0, 0.0

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Measures the time in which this process waits for its devices."""
    start = time.perf_counter()
    yield
    self._waited_s += time.perf_counter() - start

  def step(self, step: int) -> None:
    """Counts a step, and compares the processes if a comparison is due.

    All processes must call it after every step.

    Args:
      step: number of updates completed.
    """
    self._steps += 1
    if not self._every_steps or step % self._every_steps:
      return
    elapsed = self._ledger.steps_s() - self._start
    local = [(elapsed - self._waited_s) / self._steps, elapsed / self._steps]
    # [processes, 2]: host time and time of a step.
    times = multihost_utils.process_allgather(np.array(local, np.float32))
    self._start_interval()
    host_s, step_s = times[:, 0].tolist(), times[:, 1].tolist()
    slow = slow_hosts(host_s, statistics.median_low(step_s))
    if slow and jax.process_index() == 0:
      log.warning(
        'slow host(s) up to step %d: process %s; seconds per step spent on '
        'data and Python code, by process: %s',
        step,
        ', '.join(map(str, slow)),
        [round(seconds, 3) for seconds in host_s],
      )
      self._ledger.event('slow_hosts', step=step, processes=slow, own_s=host_s)


class Profile:
  """Traces the steps from START to STOP.

  If the run resumes between the two, its first step is the first to be traced.
  If the run ends or is rolled back between them, the trace ends there.
  """

  def __init__(self, span: tuple[int, int] | None, workdir: epath.Path):
    """Sets the steps to trace.

    Args:
      span: (START, STOP), in updates; None for no trace.
      workdir: directory of the run; the trace is written to `profile` in it.
    """
    self._start, self._stop = span or (0, 0)
    self._folder, self._active = workdir / 'profile', False
    self._step = 0

  def update(self, step: int) -> None:
    """Starts or ends the trace if this is due; to be called before each step.

    Args:
      step: number of updates completed.
    """
    self._step = step
    if self._active and step >= self._stop:
      self.close()
    elif not self._active and self._start <= step < self._stop:
      jax.profiler.start_trace(str(self._folder))
      self._start, self._active = step, True

  def close(self) -> None:
    """Ends the trace and writes it, if one is running."""
    if self._active:
      self._active, self._stop = False, 0  # only one trace per start
      jax.profiler.stop_trace()
      log.info(
        'wrote the trace of the steps from %d to %d to %s',
        self._start,
        self._step,
        self._folder,
      )
