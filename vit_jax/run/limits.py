"""Bounds of training metrics that a config names, and what to do beyond them.

They see the metrics of every good step: those of the objective (a teacher's
entropy, say) and of the loop (loss, grad_norm). The judgement follows from the
metrics alone, which are the same on every process, so all come to it at the
same step. What a run has counted so far it forgets when it is restarted, and
a warning comes again.
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
    metric: its name in metrics.jsonl.
    at_least: the smallest value that is well; None for no such bound.
    at_most: the largest.
    during: the duration that it must be beyond them without a break before
      anything is done.
    start: the duration from the start of the training that does not count.
    stop: whether the run then ends, with exit code 43, after a warning; its
      last checkpoint stays.
  """

  metric: str = dataclasses.field(kw_only=True)
  at_least: float | None = dataclasses.field(default=None, kw_only=True)
  at_most: float | None = dataclasses.field(default=None, kw_only=True)
  during: str = dataclasses.field(default='200 steps', kw_only=True)
  start: str = dataclasses.field(default='0 steps', kw_only=True)
  stop: bool = dataclasses.field(default=False, kw_only=True)

  def __post_init__(self):
    where = f'recovery.limits: the limit of {self.metric}'
    check_range(f'{where}, at_least,', self.at_least)
    check_range(f'{where}, at_most,', self.at_most)
    durations.check(f'{where}, during,', self.during, positive=True)
    durations.check(f'{where}, start,', self.start)
    if self.at_least is None and self.at_most is None:
      raise UserError(f'{where} has no bound: give at_least, at_most or both.')

  def keeps(self, value: float) -> bool:
    """Whether a value is within the bounds; NaN is not."""
    above = self.at_least is None or value >= self.at_least
    return above and (self.at_most is None or value <= self.at_most)

  def __str__(self) -> str:
    bounds = {'at least': self.at_least, 'at most': self.at_most}
    words = [f'{k} {v:.6g}' for k, v in bounds.items() if v is not None]
    return f'{self.metric} {" and ".join(words)}'


LIMITS = plugins.Nested('vit_jax.run.limits:Limit', many=True)


def build(sections: Mapping[str, Any] | None) -> dict[str, Limit]:
  """The limits of a config, by their names.

  Raises:
    UserError: one cannot be.
  """
  return {
    name: plugins.build(LIMITS.constructor(''), section)
    for name, section in (sections or {}).items()
  }


class Limits:
  """Watches metrics, step by step."""

  def __init__(
    self,
    limits: Mapping[str, Limit],
    steps: Callable[[str], int],
    ledger: Ledger,
  ):
    """Looks at nothing yet.

    Args:
      limits: by name, as warnings and events call them.
      steps: a duration of the training in updates.
      ledger: where it is noted when one is passed.
    """
    self._limits, self._steps, self._ledger = limits, steps, ledger
    self._beyond = dict.fromkeys(limits, 0)  # steps in a row

  def step(self, step: int, values: Mapping[str, float]) -> None:
    """Judges the metrics of the step that completed `step` updates.

    Raises:
      DivergedError: a limit that stops the run has been passed for long enough.
      UserError: there is no such metric.
    """
    for name, limit in self._limits.items():
      if limit.metric not in values:
        raise UserError(
          f'config.recovery.limits.{name}.metric is {limit.metric!r}, and this '
          f'training has no such metric; {closest(limit.metric, values)}.'
        )
      value = values[limit.metric]
      if step <= self._steps(limit.start) or limit.keeps(value):
        self._beyond[name] = 0
        continue
      self._beyond[name] += 1
      if self._beyond[name] == self._steps(limit.during):
        self._passed(name, limit, step, value)

  def _passed(self, name: str, limit: Limit, step: int, value: float) -> None:
    """Says so, once for each time that it happens."""
    text = (
      f'{name}: {limit.metric} is {value:.6g} at step {step} and has been '
      f'beyond its limit ({limit}) for {limit.during}'
    )
    log.warning('LIMIT PASSED. %s', text)
    self._ledger.event(
      'limit', name=name, metric=limit.metric, value=value, step=step
    )
    if limit.stop:
      raise DivergedError(
        f'{text}. The run stops, as config.recovery.limits.{name}.stop says; '
        'its last checkpoint stays. Look at metrics.jsonl for what changed '
        'before, go back to an earlier checkpoint or change the settings.'
      )
