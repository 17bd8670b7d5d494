"""Whether higher or lower values of a metric are better.

The class of an evaluator lists the names of its metrics in `higher_is_better`
and `lower_is_better`, as patterns. They determine which checkpoint, and which
setting of a sweep, is the best.
"""

import fnmatch
from typing import Any

from vit_jax.config.schema import EVALS, Config, resolve

_LOSS = 'loss'  # the loss of the training, which is not an evaluator's metric


def section_of(evals: Config, metric: str) -> Config:
  """Returns the section of the evaluator that computes a metric; {} if none.

  Args:
    evals: sections of `config.evals`, by name.
    metric: 'val/accuracy', or 'val_ema/accuracy' for the average of the
      parameters.
  """
  evaluator = metric.rpartition('/')[0]
  # 'val_ema' is 'val' with other weights, unless it is an evaluator's name.
  names = [name for name in evals if f'{evaluator}_'.startswith(f'{name}_')]
  return evals[max(names, key=len)] if names else {}


def sign(evals: Config, metric: str) -> int:
  """Returns 1 if higher values of a metric are better, and -1 if lower are.

  The result is 0 if the evaluator does not specify it, or does not exist.

  Args:
    evals: sections of `config.evals`, by name.
    metric: metric as in metrics.jsonl.

  Raises:
    UserError: the class of the evaluator does not exist.
  """
  section = section_of(evals, metric)
  if not section:
    return -1 if metric == _LOSS else 0
  return sign_of(section['name'], metric.rpartition('/')[2])


def of_best(config: Config) -> int:
  """Returns -1 if lower values of `checkpoint.best` are better, otherwise 1.

  Args:
    config: completed config of a run, or the same values as a dict.
  """
  best = config.get('checkpoint', {}).get('best')
  return sign(config.get('evals', {}), best or '') or 1


def sign_of(name: str, metric: str) -> int:
  """Returns `sign`, for a kind of evaluator and the name of its metric."""
  return next(
    (
      value
      for pattern, value in patterns(name).items()
      if fnmatch.fnmatchcase(metric, pattern)
    ),
    0,
  )


def patterns(name: str) -> dict[str, int]:
  """Returns the signs of the metrics of a kind of evaluator, by pattern."""
  kind: Any = resolve(EVALS, name)
  higher, lower = kind.higher_is_better, kind.lower_is_better
  return dict.fromkeys(higher, 1) | dict.fromkeys(lower, -1)
