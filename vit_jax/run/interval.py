"""Means of training metrics over the steps since the last log line."""

from collections.abc import Mapping
from typing import Any

# Metrics of which a line contains the value after its last step, not the mean.
_OF_THE_LAST_STEP = ('lr', 'skipped', 'epoch', 'bad_records')


class Interval:
  """Sums of each metric since the last log line.

  A checkpoint stores them, so that a resumed run writes the same lines as one
  that was never interrupted.

  Attributes:
    bad_records: number of bad training records in the interval.
  """

  def __init__(self, stored: Mapping[str, Any] | None = None):
    """Starts an interval, or continues one that a checkpoint stores.

    Args:
      stored: result of `to_json`; None for an empty interval.
    """
    stored = stored or {}
    self._count: int = stored.get('count', 0)
    self._sums: dict[str, float] = dict(stored.get('sums', {}))
    self.bad_records: int = stored.get('bad_records', 0)

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
    self._count += 1
    for key, value in values.items():
      self._sums[key] = self._sums.get(key, 0.0) + value

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
    if self._count:
      means = {key: total / self._count for key, total in self._sums.items()}
      line |= {k: v for k, v in means.items() if k not in _OF_THE_LAST_STEP}
    return line

  def to_json(self) -> dict[str, Any]:
    """Returns the sums as JSON values."""
    return {
      'count': self._count,
      'sums': self._sums,
      'bad_records': self.bad_records,
    }
