"""Metrics that `checkpoint.best` may name."""

from collections.abc import Iterable

from vit_jax.config import schema
from vit_jax.config.schema import EVALS, Config
from vit_jax.errors import UserError, closest
from vit_jax.objectives.contract import metric_suffix


def check(config: Config, weights: Iterable[str]) -> None:
  """Checks that the run computes the metric that selects its best checkpoint.

  An evaluator lists in its attribute `higher_is_better` the metrics that can
  be used; for an evaluator without it, any metric may be named.

  Args:
    config: completed config.
    weights: names of the evaluated weights, see `Objective.weights`.

  Raises:
    UserError: no evaluator of the config computes the metric, or it is missing
      although `early_stop_patience` needs it.
  """
  best = config.checkpoint.best
  if best is None:
    if config.early_stop_patience is not None:
      raise UserError(
        f'early_stop_patience={config.early_stop_patience} needs a metric: set '
        '--config.checkpoint.best=EVALUATOR/METRIC, such as val/accuracy.'
      )
    return
  metric = best.rpartition('/')[2]
  allowed = [
    f'{name}{metric_suffix(kind)}/{value}'
    for name, section in config.evals.items()
    for kind in weights
    for value in getattr(
      schema.resolve(EVALS, section.name), 'higher_is_better', (metric,)
    )
  ]
  if best not in allowed:
    raise UserError(
      f'checkpoint.best is {best!r}; {closest(best, allowed)}. Set it to a '
      'metric of config.evals whose higher values are better, or to None.'
    )
