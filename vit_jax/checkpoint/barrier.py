"""Waits for the other processes of a save, unless one of them has failed."""

import contextlib
from collections.abc import Iterator

from vit_jax.checkpoint import items
from vit_jax.processes import consensus


class Barrier:
  """Barrier of background threads, which a process that failed reaches, too.

  At Orbax's own barriers, the others would wait for it for 20 minutes.

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
