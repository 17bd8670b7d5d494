"""Decides on rollbacks after bad steps, and on the batches to skip afterwards.

The decisions depend only on each step's metrics, which are the same on every
process, and on the rollbacks so far. A rollback is written to `events.jsonl`
before it is carried out, and every later checkpoint contains it, so a run that
is killed in between repeats it. If its line in the file is damaged, the
rollback is read from the checkpoint; if there is no checkpoint after it, the
same steps are bad again.
"""

import dataclasses
from typing import Annotated, Any

from vit_jax.config import durations, plugins
from vit_jax.config.plugins import Section
from vit_jax.data.pipeline.order import batch_index
from vit_jax.errors import DivergedError, check_range
from vit_jax.run import limits as limits_lib

# {from: last bad step, step: restored step, skip: indices of batches}
Rollback = dict[str, Any]


@plugins.operational(
  'max_rollbacks',
  'sdc_every',
  'slow_hosts_every',
  'watchdog_factor',
  'watchdog_min_s',
  'watchdog_eval_s',
  'watchdog_pause_s',
  'limits',
)
@dataclasses.dataclass(frozen=True)
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
    sdc_every: duration between two replays of a step, which detect silent data
      corruption; '0 steps' for none.
    slow_hosts_every: duration between two comparisons of the hosts' times, see
      `run.stragglers`; '0 steps' for none.
    watchdog_factor: longest time of a step, in medians of recent steps.
    watchdog_min_s: seconds that any step may take, however short the median.
    watchdog_eval_s: seconds that a batch of an evaluation may take; the time of
      the first batch includes opening the data and compiling.
    watchdog_pause_s: seconds that any other work may take.
    limits: {name of your choice: bounds of a metric, and the reaction if it
      exceeds them}; see `run.limits.Limit`.
  """

  max_skipped: int = dataclasses.field(default=3, kw_only=True)
  spike_factor: float | None = dataclasses.field(default=None, kw_only=True)
  max_rollbacks: int = dataclasses.field(default=3, kw_only=True)
  sdc_every: str = dataclasses.field(default='0 steps', kw_only=True)
  slow_hosts_every: str = dataclasses.field(default='500 steps', kw_only=True)
  watchdog_factor: float = dataclasses.field(default=20.0, kw_only=True)
  watchdog_min_s: float = dataclasses.field(default=300.0, kw_only=True)
  watchdog_eval_s: float = dataclasses.field(default=1800.0, kw_only=True)
  watchdog_pause_s: float = dataclasses.field(default=7200.0, kw_only=True)
  limits: Annotated[Section | None, limits_lib.LIMITS] = dataclasses.field(
    default=None, kw_only=True
  )

  def __post_init__(self):
    for key in ('max_skipped', 'max_rollbacks'):
      check_range(f'recovery.{key}', getattr(self, key), at_least=0)
    check_range('recovery.spike_factor', self.spike_factor, above=1)
    for key in ('factor', 'min_s', 'pause_s', 'eval_s'):
      key = f'watchdog_{key}'
      check_range(f'recovery.{key}', getattr(self, key), above=0)
    for key in ('sdc_every', 'slow_hosts_every'):
      durations.check(f'recovery.{key}', getattr(self, key))
    limits_lib.build(self.limits)


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
) -> tuple[list[Rollback], list[Rollback]]:
  """Returns all rollbacks of a run that resumes, in order.

  Args:
    saved: rollbacks stored in the checkpoint.
    events: events of the run, without damaged lines.

  Returns:
    The rollbacks of the checkpoint, followed by rollbacks found only in
    events.jsonl; and the rollbacks of the checkpoint that events.jsonl lacks.
  """
  written = [
    {key: event[key] for key in ('from', 'step', 'skip')}
    for event in events
    if event['event'] == 'rollback'
  ]
  later = [rollback for rollback in written if rollback not in saved]
  missing = [rollback for rollback in saved if rollback not in written]
  return saved + later, missing


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
      f'{error}, after {len(earlier)} rollback(s). The last batches were '
      f'{batches}. Look at metrics.jsonl, events.jsonl and these batches '
      '(preview --start_step); a smaller schedule.base_lr or '
      'optimizer.clip_norm may help.'
    )
  return {'from': error.step, 'step': restored_step, 'skip': batches}
