"""Early stopping: ends a run whose best metric no longer improves.

The decision is computed from the evaluations in metrics.jsonl, which a resumed
run also has. Therefore a run that is interrupted ends at the same step as one
that is not, and a run that has ended does not continue.
"""

from typing import Any, NamedTuple

from etils import epath

from vit_jax.processes import consensus
from vit_jax.run import metric_lines


class Plateau(NamedTuple):
  """A range of evaluations in which a metric did not improve.

  Attributes:
    metric: name of the metric.
    evaluations: number of evaluations after the best one.
    best_step: step of the best evaluation; the first of equal ones, and 0 if no
      value was finite.
    step: step of the last evaluation.
  """

  metric: str
  evaluations: int
  best_step: int
  step: int

  def __str__(self) -> str:
    return (
      f'{self.metric} has not improved since step {self.best_step}, in '
      f'{self.evaluations} evaluations (early_stop_patience)'
    )


def plateau(workdir: epath.Path, config: Any) -> Plateau | None:
  """Returns the plateau at which a run ends; None if it continues.

  Only the main process of a run may call it.

  Args:
    workdir: directory of the run.
    config: completed config of the run, or the same values as a dict. Those of
      an older version may lack keys.
  """
  patience = config.get('early_stop_patience')
  metric = config.get('checkpoint', {}).get('best')
  if patience is None or metric is None:
    return None
  values = {
    step: metrics[metric]
    for step, metrics in metric_lines.read(workdir)
    if metric in metrics
  }
  best, best_step, count = float('-inf'), 0, 0
  for step in sorted(values):
    value = values[step]  # None if it was not finite
    if value is not None and value > best:
      best, best_step, count = value, step, 0
    else:
      count += 1
  if count < patience:
    return None
  return Plateau(metric, count, best_step, max(values))


def agreed(workdir: epath.Path, config: Any) -> Plateau | None:
  """Returns `plateau` of the main process on every process.

  All processes must call it.
  """
  found = consensus.from_main(lambda: plateau(workdir, config))
  return None if found is None else Plateau(*found)
