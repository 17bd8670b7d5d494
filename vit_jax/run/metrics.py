"""Where a run's numbers go: metrics.jsonl, TensorBoard and trackers."""

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Annotated, Any

from etils import epath

from vit_jax.config import durations, plugins
from vit_jax.config.plugins import Section
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import tracking

log = logging.getLogger('vit_jax')


@plugins.operational(
  *('every', 'tensorboard', 'parameters', 'curves', 'report'),
  *('trackers', 'trackers.*'),
)
@dataclasses.dataclass(frozen=True)
class Log:
  """Cadence of reporting.

  Attributes:
    every: duration between two lines of training metrics, above 0.
    tensorboard: also write TensorBoard events (needs TensorFlow).
    parameters: log the table of parameters at the start although none of them
      is split.
    curves: draw WORKDIR/curves.png at the end (needs Matplotlib).
    report: make WORKDIR/report.html at every evaluation, and at the end with
      images and predictions.
    trackers: {name of your choice: section} of further places for the numbers,
      see `tracking`.
  """

  every: str = dataclasses.field(default='50 steps', kw_only=True)
  tensorboard: bool = dataclasses.field(default=True, kw_only=True)
  parameters: bool = dataclasses.field(default=False, kw_only=True)
  curves: bool = dataclasses.field(default=True, kw_only=True)
  report: bool = dataclasses.field(default=True, kw_only=True)
  trackers: Annotated[Section | None, tracking.TRACKERS] = dataclasses.field(
    default=None, kw_only=True
  )

  def __post_init__(self):
    durations.check('log.every', self.every, positive=True)


class Writer:
  """Writes metrics.jsonl, and TensorBoard's events through CLU.

  One JSON object a line: {"step": 100, "loss": …}. A number that is not finite
  is null. Only the process with `active` writes.
  """

  def __init__(
    self,
    workdir: epath.Path,
    tensorboard: bool,
    active: bool,
    trackers: Sequence[tracking.Tracker] = (),
  ):
    self._workdir, self._trackers = workdir, trackers
    self._path = workdir / 'metrics.jsonl'
    self._remote = paths.is_remote(workdir)
    self._lines: list[str] = []
    self._file: IO[str] | None = None
    self._active = active
    self._board: Any = None
    self.training_lines = 0
    if active:
      self._board = _tensorboard(workdir) if tensorboard else None
      self._open()

  def _open(self) -> None:
    with self._trouble():
      if not self._remote:
        self._file = open(self._path, 'a', buffering=1)  # whole lines
      elif self._path.exists():  # objects there cannot be appended to
        self._lines = self._path.read_text().splitlines(keepends=True)

  @contextlib.contextmanager
  def _trouble(self) -> Iterator[None]:
    """On a UserError, stops all further writing to the file."""
    try:
      with jsonl.access(self._path, 'written'):
        yield
    except UserError:
      self._active = False
      file, self._file = self._file, None
      with contextlib.suppress(OSError):  # of what it could not write
        if file:
          file.close()
      raise

  def rewind(self, step: int, expected: int = 0) -> None:
    """Makes metrics.jsonl agree with a state restored at `step`.

    Args:
      step: of the state.
      expected: training lines up to it that were there when it was saved; what
        is missing is said.
    """
    if self._file:
      self._file.close()
      self._file = None
    self.training_lines = rewind(self._workdir, step)
    if self.training_lines < expected:
      log.warning(
        '%s has %d of the %d training lines up to step %d: the others were '
        'lost or damaged after the checkpoint was made. The training itself is '
        'not touched by it; curves have a gap',
        self._path,
        self.training_lines,
        expected,
        step,
      )
    self._open()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line; `step` is the number of updates completed.

    Raises:
      UserError: the disk is full, or the workdir gone.
    """
    if not self._active:
      return
    finite = {
      key: value if math.isfinite(value) else None
      for key, value in values.items()
    }
    line = json.dumps({'step': step, **finite}) + '\n'
    with self._trouble():
      if self._file:
        self._file.write(line)
      else:
        self._lines.append(line)
    self.training_lines += 'loss' in values
    if self._board:
      self._board.write_scalars(step, dict(values))
    for tracker in self._trackers:
      tracker.write(step, dict(values))

  def flush(self) -> None:
    """Makes sure that everything written is on disk.

    Raises:
      UserError: it cannot be, or the file is no longer where it was.
    """
    if not self._active:
      return
    with self._trouble():
      if self._file:
        self._file.flush()
        os.fsync(self._file.fileno())
        there = os.stat(self._path)  # raises if the workdir was removed
        if not os.path.samestat(there, os.fstat(self._file.fileno())):
          raise FileNotFoundError(errno.ENOENT, 'replaced', str(self._path))
      elif self._remote:
        self._path.write_text(''.join(self._lines))
    if self._board:
      self._board.flush()

  def close(self) -> None:
    """Flushes and closes; does nothing after an error, which was raised."""
    self.flush()
    if self._file:
      self._file.close()
      self._file = None
    if self._active and self._board:
      self._board.close()
    for tracker in self._trackers if self._active else ():
      tracker.close()
    self._active = False


def opened(settings: Log, run: tracking.Run, active: bool) -> Writer:
  """Where a run's numbers go.

  Args:
    settings: which places.
    run: whose.
    active: whether this is the main process.
  """
  trackers = tracking.opened(settings.trackers, run, active)
  return Writer(run.workdir, settings.tensorboard, active, trackers)


class _ObjectBoard:
  """TensorBoard's events of a workdir in an object store.

  TensorFlow writes them to a local directory, and each flush copies them whole.
  """

  def __init__(self, workdir: epath.Path, open_board: Callable[[str], Any]):
    self._workdir = workdir
    self._local = tempfile.TemporaryDirectory(prefix='vit_jax_events_')
    self._board = open_board(self._local.name)

  def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
    self._board.write_scalars(step, values)

  def flush(self) -> None:
    self._board.flush()
    for file in pathlib.Path(self._local.name).iterdir():
      (self._workdir / file.name).write_bytes(file.read_bytes())

  def close(self) -> None:
    self._board.close()
    self._local.cleanup()


def _tensorboard(workdir: epath.Path) -> Any:
  try:
    from clu import metric_writers

    if paths.is_remote(workdir):
      return _ObjectBoard(workdir, metric_writers.SummaryWriter)
    return metric_writers.SummaryWriter(str(workdir))
  except ImportError as error:
    log.info(
      'no TensorBoard events (%s is not installed); metrics.jsonl has it all',
      error.name,
    )
    return None


def rewind(workdir: epath.Path, step: int) -> int:
  """Makes metrics.jsonl agree with a state restored at `step`.

  Training lines up to the step stay, and evaluations before it (those at the
  step run again); all others, damaged ones among them, are moved to
  metrics_set_aside.jsonl.

  Returns:
    The training lines that stay.
  """
  path, lines = workdir / 'metrics.jsonl', 0

  def stays(record: dict[str, Any]) -> bool:
    nonlocal lines
    at = record.get('step')
    if (
      type(at) is not int or at > step or (at == step and 'loss' not in record)
    ):
      return False
    lines += 'loss' in record
    return True

  gone = jsonl.keep(path, stays)
  damaged = [line for line in gone if not _is_record(jsonl.parse(line))]
  if damaged:
    log.warning(
      '%s: %d damaged or foreign line(s) moved to metrics_set_aside.jsonl, the '
      'first %r',
      path,
      len(damaged),
      damaged[0][:100],
    )
  return lines


def _is_record(record: dict[str, Any] | None) -> bool:
  return record is not None and type(record.get('step')) is int
