"""Warns of training metrics that exceed their bounds, or ends the run.

After every good step, the metrics of the objective (such as a teacher's
entropy) and of the loop (loss, grad_norm) are checked. The metrics are the same
on every process, so all processes react at the same step. A restart forgets how
long a metric has been out of bounds, so a warning may be repeated.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.config import durations, plugins
from vit_jax.errors import DivergedError, UserError, check_range, closest
from vit_jax.run.ledger import Ledger

log = logging.getLogger('vit_jax')


@dataclasses.dataclass(frozen=True)
class Limit:
  """Bounds of one metric.

  Attributes:
    metric: name of the metric in metrics.jsonl.
    at_least: smallest allowed value; None for no lower bound.
    at_most: largest allowed value; None for no upper bound.
    during: duration for which the metric must be out of bounds without a break
      before a warning is logged.
    start: duration at the start of the training in which nothing is checked.
    stop: whether the run ends after the warning, with exit code 43; its last
      checkpoint is kept.
  """

  metric: str = dataclasses.field(kw_only=True)
  at_least: float | None = dataclasses.field(default=None, kw_only=True)
  at_most: float | None = dataclasses.field(default=None, kw_only=True)
  during: str = dataclasses.field(default='200 steps', kw_only=True)
  start: str = dataclasses.field(default='0 steps', kw_only=True)
  stop: bool = dataclasses.field(default=False, kw_only=True)

  def __post_init__(self):
    subject = f'recovery.limits: the limit of {self.metric}'
    check_range(f'{subject}, at_least,', self.at_least)
    check_range(f'{subject}, at_most,', self.at_most)
    durations.check(f'{subject}, during,', self.during, positive=True)
    durations.check(f'{subject}, start,', self.start)
    if self.at_least is None and self.at_most is None:
      raise UserError(
        f'{subject} has no bound: give at_least, at_most or both.'
      )

  def contains(self, value: float) -> bool:
    """Returns whether a value is within the bounds; NaN is not."""
    above = self.at_least is None or value >= self.at_least
    return above and (self.at_most is None or value <= self.at_most)

  def __str__(self) -> str:
    bounds = {'at least': self.at_least, 'at most': self.at_most}
    words = [f'{k} {v:.6g}' for k, v in bounds.items() if v is not None]
    return f'{self.metric} {" and ".join(words)}'


LIMITS = plugins.Nested('vit_jax.run.limits:Limit', many=True)


def build(sections: Mapping[str, Any] | None) -> dict[str, Limit]:
  """Builds the limits of a config, by name.

  Args:
    sections: `config.recovery.limits`.

  Raises:
    UserError: a value is invalid.
  """
  return {
    name: plugins.build(LIMITS.constructor(''), section)
    for name, section in (sections or {}).items()
  }


class Limits:
  """Checks the metrics of every step."""

  def __init__(
    self,
    limits: Mapping[str, Limit],
    steps: Callable[[str], int],
    ledger: Ledger,
  ):
    """Starts with no metric out of bounds.

    Args:
      limits: limits by name; warnings and events contain the name.
      steps: function that converts a duration to updates.
      ledger: destination of the event `limit`.
    """
    self._limits, self._steps, self._ledger = limits, steps, ledger
    self._streaks = dict.fromkeys(limits, 0)  # steps in a row out of bounds

  def step(self, step: int, values: Mapping[str, float]) -> None:
    """Checks the metrics of one step.

    Args:
      step: number of updates completed.
      values: metrics of the step, by name.

    Raises:
      DivergedError: a metric was out of bounds for `during`, and `stop` is set.
      UserError: a limit names a metric that does not exist.
    """
    for name, limit in self._limits.items():
      if limit.metric not in values:
        raise UserError(
          f'config.recovery.limits.{name}.metric is {limit.metric!r}, but this '
          f'run has no such metric; {closest(limit.metric, values)}.'
        )
      value = values[limit.metric]
      if step <= self._steps(limit.start) or limit.contains(value):
        self._streaks[name] = 0
        continue
      self._streaks[name] += 1
      if self._streaks[name] == self._steps(limit.during):
        self._report(name, limit, step, value)

  def _report(self, name: str, limit: Limit, step: int, value: float) -> None:
    """Reports a metric that has been out of bounds for `during`.

    Raises:
      DivergedError: `stop` is set.
    """
    text = (
      f'{name}: {limit.metric} is {value:.6g} at step {step} and has been '
      f'out of bounds ({limit}) for {limit.during}'
    )
    log.warning('LIMIT EXCEEDED. %s', text)
    self._ledger.event(
      'limit', name=name, metric=limit.metric, value=value, step=step
    )
    if limit.stop:
      raise DivergedError(
        f'{text}. The run stops because config.recovery.limits.{name}.stop is '
        'set; its last checkpoint is kept. metrics.jsonl shows when the metric '
        'began to change: start again from a checkpoint before that, or with '
        'other settings.'
      )
