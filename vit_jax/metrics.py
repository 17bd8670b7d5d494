"""Where a run's numbers go: metrics.jsonl and TensorBoard."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from etils import epath

from vit_jax import durations

log = logging.getLogger('vit_jax')


@dataclasses.dataclass(frozen=True)
class Log:
  """Cadence of reporting.

  Attributes:
    every: duration between two lines of training metrics, above 0.
    tensorboard: also write TensorBoard events (needs TensorFlow).
  """

  every: str = dataclasses.field(default='50 steps', kw_only=True)
  tensorboard: bool = dataclasses.field(default=True, kw_only=True)

  def __post_init__(self):
    durations.check('log.every', self.every, positive=True)


class Writer:
  """Writes metrics.jsonl, and TensorBoard's events through CLU.

  One JSON object a line: {"step": 100, "loss": …}. A number that is not finite
  is null. Only the process with `active` writes.
  """

  def __init__(self, workdir: epath.Path, tensorboard: bool, active: bool):
    self._workdir = workdir
    self._path = workdir / 'metrics.jsonl'
    self._remote = '://' in str(workdir)
    self._lines: list[str] = []
    self._file = None
    self._active = active
    self._board: Any = None
    if active:
      self._board = _tensorboard(workdir) if tensorboard else None
      self._open()

  def _open(self) -> None:
    if not self._remote:
      self._file = open(self._path, 'a', buffering=1)  # whole lines
    elif self._path.exists():  # objects there cannot be appended to
      self._lines = self._path.read_text().splitlines(keepends=True)

  def rewind(self, step: int) -> None:
    """Makes metrics.jsonl agree with a state restored at `step`."""
    if self._file:
      self._file.close()
    rewind(self._workdir, step)
    self._open()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line; `step` is the number of updates completed."""
    if not self._active:
      return
    finite = {
      key: value if math.isfinite(value) else None
      for key, value in values.items()
    }
    line = json.dumps({'step': step, **finite}) + '\n'
    if self._file:
      self._file.write(line)
    else:
      self._lines.append(line)
    if self._board:
      self._board.write_scalars(step, dict(values))

  def flush(self) -> None:
    """Makes sure that everything written is on disk."""
    if self._file:
      self._file.flush()
    elif self._active:
      self._path.write_text(''.join(self._lines))
    if self._board:
      self._board.flush()

  def close(self) -> None:
    """Flushes and closes."""
    self.flush()
    if self._file:
      self._file.close()
    if self._board:
      self._board.close()


def _tensorboard(workdir: epath.Path) -> Any:
  try:
    from clu import metric_writers

    return metric_writers.SummaryWriter(str(workdir))
  except ImportError as error:
    log.info(
      'no TensorBoard events (%s is not installed); metrics.jsonl has it all',
      error.name,
    )
    return None


def rewind(workdir: epath.Path, step: int) -> None:
  """Makes metrics.jsonl agree with a state restored at `step`.

  Training lines up to the step stay, and evaluations before it (those at the
  step run again); all others, and a line cut short, are moved to
  metrics_set_aside.jsonl.
  """
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return

  def stays(line: str) -> bool:
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      return False
    at = record['step']
    return at < step or (at == step and 'loss' in record)

  lines = path.read_text().splitlines(keepends=True)
  gone = [line for line in lines if not stays(line)]
  if not gone:
    return
  aside = workdir / 'metrics_set_aside.jsonl'
  before = aside.read_text() if aside.exists() else ''
  gone[-1] = gone[-1].rstrip('\n') + '\n'
  aside.write_text(before + ''.join(gone))
  fresh = workdir / 'metrics.jsonl.new'
  fresh.write_text(''.join(line for line in lines if stays(line)))
  fresh.replace(path)
