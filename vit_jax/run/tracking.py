"""Trackers: experiment trackers beside metrics.jsonl, each a plug-in.

`vit_jax.run.trackers.NAME` (or any module of your own) defines
`Tracker(run, /, *, …)`, whose keyword-only parameters are the keys of a section
of `config.log.trackers`, {name of your choice: section}; none by default. What
a tracker raises while a run goes on is one warning and never the run's end.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from etils import epath

from vit_jax.config import plugins
from vit_jax.config.plugins import Nested

log = logging.getLogger('vit_jax')
TRACKERS = Nested('vit_jax.run.trackers.{name}:Tracker', many=True)


class Run(NamedTuple):
  """What a tracker is told of a run.

  Attributes:
    name: of its workdir.
    identity: the same whenever a run of this workdir resumes.
    workdir: of the run.
    config: completed; {'model.depth': 12, …}.
  """

  name: str
  identity: str
  workdir: epath.Path
  config: dict[str, Any]

  @classmethod
  def of(cls, workdir: epath.Path, config: dict[str, Any]) -> 'Run':
    """The run of a workdir."""
    identity = hashlib.sha256(str(workdir).encode()).hexdigest()[:16]
    return cls(workdir.name, identity, workdir, config)


class Tracker(Protocol):
  """Takes a run's numbers; only the main process has one."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Takes what a line of metrics.jsonl holds.

    Args:
      step: updates completed. A run that resumes repeats those after its last
        checkpoint.
      values: by name; may not be finite.
    """
    ...

  def close(self) -> None:
    """Called once, at the end of the process's part in the run."""
    ...


class Guarded:
  """A tracker whose errors are told once and end nothing."""

  def __init__(self, name: str, section: Mapping[str, Any], run: Run):
    """Builds it; without it the run goes on where that fails.

    Args:
      name: in `config.log.trackers`.
      section: of it, completed.
      run: of which it is told.
    """
    self._name, self._warned = name, False
    self._tracker: Tracker | None = None
    constructor = TRACKERS.constructor(section['name'])
    with self._guard():
      self._tracker = plugins.build(constructor, section, run)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Hands a line on."""
    with self._guard():
      if self._tracker:
        self._tracker.write(step, values)

  def close(self) -> None:
    """Closes it."""
    with self._guard():
      if self._tracker:
        self._tracker.close()

  @contextlib.contextmanager
  def _guard(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # noqa: BLE001 (each has errors of its own)
      if not self._warned:
        log.warning(
          'the tracker config.log.trackers.%s failed (%s: %s); the run goes on '
          'and metrics.jsonl has everything; further errors of it are not said',
          *(self._name, type(error).__name__, ' '.join(str(error).split())),
        )
      self._warned = True


def opened(
  sections: Mapping[str, Any] | None, run: Run, active: bool
) -> list[Guarded]:
  """The trackers of a config.

  Args:
    sections: {name: section}, completed.
    run: of which they are told.
    active: whether this is the main process; others have none.
  """
  if not active:
    return []
  return [Guarded(name, each, run) for name, each in (sections or {}).items()]
