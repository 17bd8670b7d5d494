"""Sends metrics to experiment trackers, in addition to metrics.jsonl.

`config.log.trackers` is {name of your choice: section}; none by default. A
tracker is a plug-in: `vit_jax.run.trackers.NAME`, or any module of your own,
defines `Tracker(run, /, *, …)`, whose keyword-only parameters are the keys of
the section. Errors of a tracker do not end a run; the first is logged as a
warning.
"""

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from etils import epath

from vit_jax.config import schema
from vit_jax.config.schema import Nested
from vit_jax.files import paths

log = logging.getLogger('vit_jax')
TRACKERS = Nested('vit_jax.run.trackers.{name}:Tracker', many=True)


class Run(NamedTuple):
  """Description of a run for trackers.

  Attributes:
    workdir: directory of the run.
    config: completed config, flat: {'model.depth': 12, …}.
  """

  workdir: epath.Path
  config: dict[str, Any]

  @property
  def name(self) -> str:
    """Name of the workdir."""
    return self.workdir.name

  @property
  def identity(self) -> str:
    """Id of the run, which does not change when the run resumes.

    It is stored in the workdir, so that a workdir that was removed and begun
    again is another run.
    """
    file = self.workdir / 'tracker_id.txt'
    if file.exists():
      return file.read_text().strip()
    identity = uuid.uuid4().hex[:16]
    paths.save(file, identity + '\n')
    return identity


class Tracker(Protocol):
  """Receives a run's metrics; only the main process has trackers.

  A tracker that can drop metrics may also have a method `rewind(step)`. It is
  called when the run starts from a state after `step` updates: metrics of later
  steps, and the evaluations at the step, are computed again.
  """

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Receives the content of a line of metrics.jsonl.

    Args:
      step: number of updates completed. A run that resumes repeats the steps
        after its last checkpoint.
      values: metrics by name; some may be NaN or infinite.
    """
    ...

  def close(self) -> None:
    """Closes the tracker; called once, when this process ends the run."""
    ...


class Guarded:
  """Wraps a tracker, so that its errors do not end the run."""

  def __init__(self, name: str, section: Mapping[str, Any], run: Run):
    """Builds the tracker; if that fails, the run continues without it.

    Args:
      name: path of the tracker's key in `config.log`.
      section: completed section of the tracker.
      run: description of the run.
    """
    self._name, self._warned, self._tracker = name, False, None
    self._tracker = self._call(self._build, section, run)

  def _build(self, section: Mapping[str, Any], run: Run) -> Tracker:
    constructor = TRACKERS.constructor(section['name'])
    return schema.construct(constructor, section, run)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Passes a line to the tracker; see `Tracker.write`."""
    if self._tracker:
      self._call(self._tracker.write, step, values)

  def rewind(self, step: int) -> None:
    """Passes the step of a restored state to a tracker with this method."""
    rewind = getattr(self._tracker, 'rewind', None)
    if rewind:
      self._call(rewind, step)

  def close(self) -> None:
    """Closes the tracker."""
    if self._tracker:
      self._call(self._tracker.close)

  def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a function, or None after an error, logged once."""
    try:
      return function(*arguments)
    except Exception as error:  # noqa: BLE001 (each library has its own errors)
      if not self._warned:
        log.warning(
          'the tracker config.log.%s failed (%s). The run continues and '
          'metrics.jsonl has all values; further errors are not logged',
          self._name,
          paths.reason(error),
        )
      self._warned = True


def open_trackers(settings: Any, run: Run) -> list[Guarded]:
  """Builds the trackers of a config, for the main process.

  Args:
    settings: section `log` of the config, a `metrics.Log`.
    run: description of the run.
  """
  sections = {
    f'trackers.{name}': section
    for name, section in (settings.trackers or {}).items()
  }
  if settings.tensorboard:
    sections['tensorboard'] = {'name': 'tensorboard'}
  return [Guarded(name, section, run) for name, section in sections.items()]
