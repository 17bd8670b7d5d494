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
