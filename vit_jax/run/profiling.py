"""Traces some steps with JAX's profiler (--profile=START:STOP)."""

import logging

import jax
from etils import epath

log = logging.getLogger('vit_jax')


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
    self._span, self._folder = span, workdir / 'profile'
    self._first = self._last = 0
    self._active = False

  def update(self, step: int) -> None:
    """Starts or ends the trace if this is due; to be called before each step.

    Args:
      step: number of updates completed.
    """
    if self._span is None:
      return
    start, stop = self._span
    if self._active and step < stop:
      self._last = step
    elif self._active:
      self._last = stop
      self.close()
    elif start <= step < stop:
      jax.profiler.start_trace(str(self._folder))
      self._active, self._first, self._last = True, step, step

  def close(self) -> None:
    """Ends the trace and writes it, if one is running."""
    if not self._active:
      return
    self._active, self._span = False, None  # only one trace per start
    jax.profiler.stop_trace()
    log.info(
      'wrote the trace of steps %d to %d to %s',
      self._first,
      self._last,
      self._folder,
    )
