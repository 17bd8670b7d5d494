"""A trace of some steps, by JAX's profiler: --profile=START:STOP."""

import logging

import jax
from etils import epath

log = logging.getLogger('vit_jax')


class Profile:
  """Traces the steps from START to STOP, or what of them there is.

  A run that begins between the two traces from there on; one that ends between
  them, or goes back to an earlier step, keeps what was traced.
  """

  def __init__(self, span: tuple[int, int] | None, workdir: epath.Path):
    """Traces nothing yet.

    Args:
      span: [START, STOP) in updates; None for no trace.
      workdir: of the run; the trace goes into its directory `profile`.
    """
    self._span, self._folder = span, workdir / 'profile'
    self._first = self._last = 0
    self._active = False

  def at(self, step: int) -> None:
    """Called before each step, with the number of those done."""
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
    """Writes what was traced, if something is being traced."""
    if not self._active:
      return
    self._active, self._span = False, None  # one trace is enough
    jax.profiler.stop_trace()
    log.info(
      'wrote the trace of steps %d to %d to %s',
      *(self._first, self._last, self._folder),
    )
