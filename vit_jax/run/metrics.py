"""Writes a run's metrics to metrics.jsonl and to trackers, and reads them.

A line of training metrics has the means over the steps since the last line. A
reader leaves out what is not a metric, such as damaged lines.
"""

import contextlib
import dataclasses
import errno
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from etils import epath

from vit_jax.config import durations, schema
from vit_jax.config.schema import Section
from vit_jax.errors import StorageError, UserError
from vit_jax.files import jsonl, paths
from vit_jax.files.paths import with_retries
from vit_jax.run import tracking

Metrics = dict[str, float | None]  # None: the value was not finite


def read(workdir: epath.Path) -> Iterator[tuple[int, Metrics]]:
  """Reads the metrics of a run; a missing file has no lines.

  Lines that are not JSON objects or whose `step` is not an integer of 64 bits
  are left out, and so are values that are neither numbers nor null.

  Args:
    workdir: directory of the run.

  Yields:
    (number of updates completed, metrics by name) of each line.

  Raises:
    UserError: the file exists, but there is no permission to read it.
    StorageError: the file exists, but cannot be read.
  """
  for _, record in jsonl.read(workdir / 'metrics.jsonl'):
    step = record.pop('step', None) if record else None
    if record is not None and type(step) is int and step.bit_length() < 64:
      yield (
        step,
        {
          # False for NaN, and for integers with hundreds of digits.
          name: value if abs(value or 0) <= sys.float_info.max else None
          for name, value in record.items()
          if value is None or type(value) in (int, float)  # but not bool
        },
      )


# Metrics of which a line contains the value after its last step, not the mean.
_OF_THE_LAST_STEP = ('lr', 'skipped', 'epoch', 'bad_records')


@dataclasses.dataclass
class Interval:
  """Sums of each metric since the last log line.

  A checkpoint stores them as a dict, so that a resumed run writes the same
  lines as one that was never interrupted.

  Attributes:
    count: number of good steps in the interval.
    sums: sums over the good steps, by metric.
    bad_records: number of bad training records in the interval.
  """

  count: int = 0
  sums: dict[str, float] = dataclasses.field(default_factory=dict)
  bad_records: int = 0

  def add(self, values: Mapping[str, float]) -> None:
    """Adds the metrics of one step.

    Of a bad step only the bad records count, because it changed no parameter
    and its loss may not be finite.

    Args:
      values: metrics of the step; `skipped` is 0 for a good step.
    """
    self.bad_records += int(values.get('bad_records', 0))
    if values['skipped']:
      return
    self.count += 1
    for key, value in values.items():
      self.sums[key] = self.sums.get(key, 0.0) + value

  def summary(self, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a log line.

    Args:
      values: metrics of the last step, which must have been added already.

    Returns:
      `values`, in which the mean over good steps replaces each metric except
      learning rate, epoch, and the numbers of bad steps and records. If no step
      was good, `values` unchanged.
    """
    line = dict(values)
    if self.count:
      means = {key: total / self.count for key, total in self.sums.items()}
      line |= {k: v for k, v in means.items() if k not in _OF_THE_LAST_STEP}
    return line


@schema.operational(
  'every',
  'tensorboard',
  'curves',
  'report',
  'trackers',
  'trackers.*',
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
  """Cadence and destinations of metrics.

  Attributes:
    every: duration between two lines of training metrics, above 0. Each line
      has the means over the steps since the previous line.
    tensorboard: whether to write TensorBoard events (needs the package
      tensorboard).
    curves: whether to draw WORKDIR/curves.png at the end (needs Matplotlib).
    report: whether to write WORKDIR/report.html at every evaluation, and at
      the end with images and predictions.
    trackers: {name of your choice: section} of experiment trackers, see
      `tracking`.
  """

  every: str = '50 steps'
  tensorboard: bool = True
  curves: bool = True
  report: bool = True
  trackers: Annotated[Section | None, tracking.TRACKERS] = None

  def __post_init__(self):
    durations.check('log.every', self.every, positive=True)


class Writer:
  """Writes metrics.jsonl, and passes each line to the trackers.

  Each line is one JSON object: {"step": 100, "loss": …}. Numbers that are not
  finite are written as null. Only the main process writes.
  """

  def __init__(
    self,
    workdir: epath.Path,
    active: bool,
    trackers: Sequence[tracking.Guarded] = (),
  ):
    """Opens the file.

    Args:
      workdir: directory of the run.
      active: whether this is the main process.
      trackers: trackers that receive every line.
    """
    self._path, self._trackers = workdir / 'metrics.jsonl', trackers
    self._active = active
    if active:
      self._open()

  def _open(self) -> None:
    with self._stops_at_errors():
      self._file = jsonl.Appender(self._path)
      self._stat: os.stat_result | None = None  # identifies a local file
      if paths.is_remote(self._path):
        return

      def touch() -> os.stat_result:
        self._path.touch()
        return os.stat(self._path)

      self._stat = with_retries(touch, self._path, 'written')

  @contextlib.contextmanager
  def _stops_at_errors(self) -> Iterator[None]:
    """Stops all writing after an error, so that only one error is raised."""
    try:
      yield
    except (UserError, StorageError):
      self._active = False
      raise

  def rewind(self, step: int) -> None:
    """Makes metrics.jsonl agree with a state restored at `step`.

    Training lines up to the step, and evaluations before it, are kept. The
    evaluations at the step will run again. All other lines, and damaged ones,
    are moved to metrics_set_aside.jsonl.

    Args:
      step: number of updates completed.
    """
    with self._stops_at_errors():
      jsonl.keep(
        self._path,
        lambda record: is_before(record, step),
        lambda record: type(record.get('step')) is int,
      )
    self._open()  # rewinding may have replaced the file
    for tracker in self._trackers:
      tracker.rewind(step)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line.

    Args:
      step: number of updates completed.
      values: metrics by name.

    Raises:
      UserError: the workdir was removed, or there is no permission to write it.
      StorageError: the storage is full or keeps failing.
    """
    if not self._active:
      return
    finite = {
      key: value if math.isfinite(value) else None
      for key, value in values.items()
    }
    with self._stops_at_errors():
      self._check_file()
      self._file.append({'step': step, **finite})
    for tracker in self._trackers:
      tracker.write(step, dict(values))

  def _check_file(self) -> None:
    """Checks that the path of a local file still leads to the opened file.

    Raises:
      UserError: the workdir was removed, or replaced by another one.
    """
    if self._stat is None:
      return
    with paths.access(self._path, 'written'):
      if not os.path.samestat(os.stat(self._path), self._stat):
        raise FileNotFoundError(errno.ENOENT, 'replaced', str(self._path))

  def flush(self) -> None:
    """Makes sure that everything written is on disk.

    Raises:
      UserError: the workdir was removed, or there is no permission to write it.
      StorageError: the storage is full or keeps failing.
    """
    if not self._active:
      return
    with self._stops_at_errors():
      self._check_file()
      self._file.sync()

  def close(self) -> None:
    """Flushes the file and closes trackers, unless writing failed before."""
    self.flush()
    for tracker in self._trackers if self._active else ():
      tracker.close()
    self._active = False


def is_before(record: dict[str, Any], step: int) -> bool:
  """Returns whether a line belongs to a state restored at `step`.

  These are training lines up to the step, and evaluations before it. Only lines
  of training metrics have the key 'loss'; those of evaluations have 'val/loss'.
  """
  at = record.get('step')
  if type(at) is not int:
    return False
  return at <= step if 'loss' in record else at < step
