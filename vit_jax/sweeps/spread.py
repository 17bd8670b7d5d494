"""Means and standard deviations over seeds."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
  """Mean and sample standard deviation of several values.

  The standard deviation of a single value is NaN.
  """

  mean: float
  std: float = math.nan

  @classmethod
  def of(cls, values: Sequence[float]) -> 'Spread':
    """Summarises one or more values; -inf is the value of a diverged run."""
    mean = math.fsum(values) / len(values)
    several = len(values) > 1 and math.isfinite(mean)
    return cls(mean, statistics.stdev(values) if several else math.nan)

  def __str__(self) -> str:
    """Formats the spread in percent: '97.12 ± 0.31'."""
    if not math.isfinite(self.mean):
      return 'diverged'
    std = '' if math.isnan(self.std) else f' ± {100 * self.std:.2f}'
    return f'{100 * self.mean:.2f}{std}'
