"""Reads the outcome of a run from its workdir; means and spreads over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax.checkpoint import steps
from vit_jax.config import direction
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger
from vit_jax.run import metrics as metrics_lib

Metrics = Mapping[str, float | None]  # None: the value was not finite
DIVERGED = float('-inf')  # metric of a run that diverged; it is never the best


def metrics(command: str, workdir: str) -> Metrics | None:
  """Returns the metrics of a finished run.

  A training run is finished if its last event is `finished`, and its workdir
  contains the metrics and the checkpoint of that step; an evaluation, if its
  workdir contains the result.

  Args:
    command: 'train', 'finetune' or 'evaluate'.
    workdir: workdir of the run.

  Returns:
    The metrics; {} for a run that diverged, None for a run that is not
    finished.
  """
  if diverged_file(workdir).exists():
    return {}
  if command == 'evaluate':
    return jsonl.read_object(result_file(workdir)) or None
  return _of_training(paths.locate(workdir))


def _of_training(workdir: epath.Path) -> Metrics | None:
  """Returns the metrics of the last step; None if training is not finished."""
  end = ledger.finished(ledger.read(workdir / 'events.jsonl'))
  if not end or end['step'] not in steps.committed(workdir / 'checkpoints'):
    return None
  found = {}
  for step, values in metrics_lib.read(workdir):
    if step == end['step']:
      found |= values
  return found if found.keys() >= set(end['metrics']) else None


def best_step(workdir: str, metric: str, sign: int) -> int:
  """Returns the step with the best metric among those with a checkpoint.

  The first of several steps with equal values is returned.

  Args:
    workdir: workdir of a run.
    metric: name of the metric.
    sign: -1 if lower values are better.
  """
  path = paths.locate(workdir)
  saved = steps.committed(path / 'checkpoints')
  values = {
    step: value
    for step, metrics in metrics_lib.read(path)
    if step in saved and (value := metrics.get(metric)) is not None
  }
  return min(values, key=lambda step: (-sign * values[step], step))


def evals(workdir: str) -> Mapping[str, Any]:
  """Returns the sections of the evaluators of a training run, by name."""
  config = jsonl.read_object(paths.locate(workdir) / 'config.json')
  return config.get('evals', {})


def split(workdir: str, metric: str) -> str:
  """Returns the split of a training run's metric; '' if it is unknown."""
  section = direction.section_of(evals(workdir), metric)
  return section.get('split', '')


def result_file(workdir: str) -> epath.Path:
  """Returns the file to which an evaluation writes its result."""
  return paths.locate(workdir) / 'result.json'


def diverged_file(workdir: str) -> epath.Path:
  """Returns the path of the marker of a diverged run, which is not repeated."""
  return paths.locate(workdir) / 'diverged.json'


class Spread(NamedTuple):
  """Mean and sample standard deviation of several values.

  Attributes:
    mean: mean; -inf if a run diverged.
    std: standard deviation; NaN for a single value.
    percent: whether the values are fractions, which are shown in percent.
  """

  mean: float
  std: float = math.nan
  percent: bool = True

  @classmethod
  def of(cls, values: Sequence[float], percent: bool = True) -> 'Spread':
    """Summarises one or more values; -inf is the value of a diverged run."""
    mean = math.fsum(values) / len(values)
    several = len(values) > 1 and math.isfinite(mean)
    std = statistics.stdev(values) if several else math.nan
    return cls(mean, std, percent)

  def __str__(self) -> str:
    """Formats the spread: '97.12 ± 0.31' in percent, or '2.3026 ± 0.0021'."""
    if not math.isfinite(self.mean):
      return 'diverged'
    scale, digits = (100, 2) if self.percent else (1, 4)
    std = f' ± {scale * self.std:.{digits}f}'
    return (
      f'{scale * self.mean:.{digits}f}{"" if math.isnan(self.std) else std}'
    )
