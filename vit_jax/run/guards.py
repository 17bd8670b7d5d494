"""Reactions to the metrics of a run: limits, rollbacks and early stopping.

All decisions depend only on metrics and events that are the same on every
process, so all processes react at the same step. `rollback` and `plateau`
decide in a run that was interrupted like in one that was not:

- `Limits` checks the metrics of every good step. A metric that stays out of its
  bounds causes a warning, or ends the run. A restart forgets how long a metric
  has been out of bounds, so a warning may be repeated, and the end come later.
- `rollback` decides on the batches to skip after too many bad steps in a row. A
  rollback is written to events.jsonl before it is carried out, and every later
  checkpoint contains it, so a run that is killed in between repeats it. If its
  line in the file is damaged, the rollback is read from the checkpoint; if
  there is no checkpoint after it, the same steps are bad again.
- `plateau` finds out, from the evaluations in metrics.jsonl, whether the run
  ends because its best metric no longer improves.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from etils import epath

from vit_jax.config import durations, schema
from vit_jax.config.schema import Section
from vit_jax.data.pipeline.order import batch_index
from vit_jax.errors import DivergedError, UserError, check_range, closest
from vit_jax.run import metrics as metrics_lib
from vit_jax.run.ledger import Ledger

log = logging.getLogger('vit_jax')


@dataclasses.dataclass(frozen=True, kw_only=True)
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

  metric: str
  at_least: float | None = None
  at_most: float | None = None
  during: str = '200 steps'
  start: str = '0 steps'
  stop: bool = False

  def __post_init__(self):
    subject = f'recovery.limits: the limit of {self.metric}'
    check_range(f'{subject}, at_least,', self.at_least)
    check_range(f'{subject}, at_most,', self.at_most)
    durations.check(f'{subject}, during,', self.during, positive=True)
    durations.check(f'{subject}, start,', self.start)
    if self.at_least is None and self.at_most is None:
      raise UserError(f'{subject} has no bound: give at_least or at_most.')

  def contains(self, value: float) -> bool:
    """Returns whether a value is within the bounds; NaN is not."""
    is_above = self.at_least is None or value >= self.at_least
    is_below = self.at_most is None or value <= self.at_most
    return is_above and is_below

  def __str__(self) -> str:
    bounds = {'at least': self.at_least, 'at most': self.at_most}
    words = [f'{k} {v:.6g}' for k, v in bounds.items() if v is not None]
    return f'{self.metric} {" and ".join(words)}'


# Annotation of the key `recovery.limits`, a dict of sections for `Limit`.
LIMITS = schema.Nested('vit_jax.run.guards:Limit', many=True)


class Limits:
  """Checks the metrics of good steps; others do not end a streak."""

  def __init__(
    self,
    limits: Mapping[str, Any] | None,
    steps: Callable[[str], int],
    ledger: Ledger,
  ):
    """Starts with no metric out of bounds.

    Args:
      limits: `config.recovery.limits`, the bounds by name. Warnings and events
        contain the name.
      steps: function that converts a duration to updates.
      ledger: destination of the event `limit`.

    Raises:
      UserError: a value is invalid.
    """
    self._limits: dict[str, Limit] = {
      name: schema.construct(Limit, section)
      for name, section in (limits or {}).items()
    }
    self._steps, self._ledger = steps, ledger
    self._streaks = dict.fromkeys(self._limits, 0)  # steps in a row

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
      # One warning for each streak, in the step in which it is long enough.
      if self._streaks[name] != self._steps(limit.during):
        continue
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
          f'{text}, and config.recovery.limits.{name}.stop is set: start again '
          'from an earlier checkpoint, or with other settings.'
        )


# {from: last bad step, step: restored step, skip: indices of batches}
Rollback = dict[str, Any]


@schema.operational(
  'max_rollbacks',
  'slow_hosts_every',
  'watchdog_factor',
  'watchdog_min_s',
  'watchdog_eval_s',
  'watchdog_pause_s',
  'limits',
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
  """Reactions of a run to bad steps, slow hosts and lost processes.

  A bad step (loss or gradient not finite, or a spike) never changes parameters;
  see `step.Trainer.train_step`.

  Attributes:
    max_skipped: number of bad steps in a row that are only skipped; after one
      more, the run is rolled back to the last checkpoint.
    spike_factor: a step is bad if its loss is above this many times the mean of
      recent losses; None for no such limit.
    max_rollbacks: maximum number of rollbacks in the whole run; if another one
      is needed, the run ends with exit code 43.
    slow_hosts_every: duration between two comparisons of the hosts' times, see
      `run.profiling`; '0 steps' for none.
    watchdog_factor: longest time of a step, in medians of recent steps.
    watchdog_min_s: seconds that any step may take, however short the median.
    watchdog_eval_s: seconds that a batch of an evaluation may take; the time of
      the first batch includes opening the data and compiling.
    watchdog_pause_s: seconds that any other work may take.
    limits: {name of your choice: bounds of a metric, and the reaction if it
      exceeds them}; see `Limit`.
  """

  max_skipped: int = 3
  spike_factor: float | None = None
  max_rollbacks: int = 3
  slow_hosts_every: str = '500 steps'
  watchdog_factor: float = 20.0
  watchdog_min_s: float = 300.0
  watchdog_eval_s: float = 1800.0
  watchdog_pause_s: float = 7200.0
  limits: Annotated[Section | None, LIMITS] = None

  def __post_init__(self):
    for key in ('max_skipped', 'max_rollbacks'):
      check_range(f'recovery.{key}', getattr(self, key), at_least=0)
    check_range('recovery.spike_factor', self.spike_factor, above=1)
    for key in ('factor', 'min_s', 'pause_s', 'eval_s'):
      key = f'watchdog_{key}'
      check_range(f'recovery.{key}', getattr(self, key), above=0)
    durations.check('recovery.slow_hosts_every', self.slow_hosts_every)
    for section in (self.limits or {}).values():
      schema.construct(Limit, section)  # only checks its values


class RollbackError(Exception):
  """There were too many bad steps in a row; the run must be rolled back.

  Attributes:
    step: number of updates completed at the last bad step.
    streak: number of bad steps in a row.
  """

  def __init__(self, step: int, streak: int):
    super().__init__(f'{streak} bad steps in a row up to step {step}')
    self.step, self.streak = step, streak


def rollbacks(
  saved: list[Rollback], events: list[dict[str, Any]]
) -> list[Rollback]:
  """Returns all rollbacks of a run that resumes, in order.

  The checkpoint contains them, too, because lines of events.jsonl may be lost.

  Args:
    saved: rollbacks stored in the checkpoint.
    events: events of the run, without damaged lines.
  """
  written = [
    {key: event[key] for key in ('from', 'step', 'skip')}
    for event in events
    if event['event'] == 'rollback'
  ]
  return saved + [rollback for rollback in written if rollback not in saved]


def skip_list(earlier: list[Rollback]) -> tuple[int, ...]:
  """Returns the indices of batches to skip after all rollbacks, ascending."""
  return tuple(sorted({b for rollback in earlier for b in rollback['skip']}))


def rollback(
  error: RollbackError,
  earlier: list[Rollback],
  restored_step: int,
  recovery: Recovery,
) -> Rollback:
  """Returns the record of a rollback, for events.jsonl and later checkpoints.

  Args:
    error: description of the bad steps.
    earlier: rollbacks so far.
    restored_step: step of the checkpoint that the run goes back to.
    recovery: section `recovery` of the config.

  Raises:
    DivergedError: no more rollbacks are allowed.
  """
  skipped = skip_list(earlier)
  # The batch of step s (counted from 1) is the batch after s - 1 updates.
  # Batches before the checkpoint are not drawn again; to skip them would only
  # shift all later batches.
  first = max(error.step - error.streak, restored_step)
  batches = [batch_index(step, skipped) for step in range(first, error.step)]
  if len(earlier) >= recovery.max_rollbacks:
    raise DivergedError(
      f'{error}, after {len(earlier)} rollback(s). Look at metrics.jsonl and '
      f'the last batches {batches} (preview --start_step); a smaller '
      'schedule.base_lr or optimizer.clip_norm may help.'
    )
  return {'from': error.step, 'step': restored_step, 'skip': batches}


def plateau(
  workdir: epath.Path, metric: str, sign: int, patience: int
) -> dict[str, Any] | None:
  """Returns the plateau at which a run ends; None if it continues.

  Only the main process of a run may call it.

  Args:
    workdir: directory of the run.
    metric: name of the metric that must improve.
    sign: -1 if lower values of the metric are better.
    patience: number of evaluations without a new best value.

  Returns:
    `metric`; `evaluations`, the number of evaluations after the best one;
    `best_step`, the step of the best evaluation (the first of equal ones, and 0
    if no value was finite); and `step`, that of the last evaluation.
  """
  values = {
    step: metrics[metric]
    for step, metrics in metrics_lib.read(workdir)
    if metric in metrics
  }
  best, best_step, count = float('-inf'), 0, 0
  for step in sorted(values):
    value = values[step]  # None if it was not finite
    if value is not None and sign * value > best:
      best, best_step, count = sign * value, step, 0
    else:
      count += 1
  if count < patience:
    return None
  return {
    'metric': metric,
    'evaluations': count,
    'best_step': best_step,
    'step': max(values),
  }
