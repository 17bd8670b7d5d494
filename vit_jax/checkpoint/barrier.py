"""Lets all processes wait for each other in a save, or fail together."""

import contextlib
from collections.abc import Iterator

from vit_jax.checkpoint import items
from vit_jax.processes import consensus


class Barrier:
  """Replaces the barrier at which the threads of a save wait for each other.

  At Orbax's own barrier, the other processes would wait 20 minutes for one that
  has failed. Here, a process reaches the barrier also if it has failed, with
  the cause, and the save then fails on all processes:

      barrier = Barrier('save/100')
      with barrier.reporting():  # an error is reported to the others
        …  # Orbax saves, and calls `barrier`

  Attributes:
    name: name of the barrier, the same on all processes.
  """

  def __init__(self, name: str):
    """Creates a barrier that no process has reached."""
    self.name, self._calls, self._has_failed = name, 0, False

  def __call__(
    self, *, key: str = '', timeout_ms: int = 1_200_000, failure: str = ''
  ) -> None:
    """Waits for the other processes; Orbax calls it twice for each step.

    Args:
      key: Orbax's name of the barrier; not used, because a process that failed
        cannot determine it.
      timeout_ms: time limit; by default that of Orbax for a save.
      failure: cause of a failure of this process.

    Raises:
      OSError: a process has failed.
    """
    self._calls += 1
    failures = consensus.gather_failures(
      f'{self.name}/{self._calls}', failure, timeout_ms
    )
    if failures:
      self._has_failed = True
      raise OSError('; '.join(failures))

  @contextlib.contextmanager
  def reporting(self) -> Iterator[None]:
    """Reports an error of the body, unless it was raised by this barrier."""
    try:
      yield
    except Exception as error:
      if not self._has_failed:
        with contextlib.suppress(Exception):
          self(failure=items.root_cause(error))
      raise
