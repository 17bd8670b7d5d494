"""Predicts the cost of a study's pre-trainings with the command `plan`."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.arrays import chips, memory
from vit_jax.cli import plan_process
from vit_jax.errors import UserError
from vit_jax.study import chains
from vit_jax.study.chains import ExtraFlags
from vit_jax.study.contents import Study

log = logging.getLogger('vit_jax')
_UNKNOWN = '–'
_NO_COMPILER = (
  'The compiler for GPUs is not installed (docs/gpus.md): ≥ marks the time at '
  'the peak rate of all GPUs, and the memory is that of state and batch.'
)
_NOT_COUNTED = (
  'Not counted: the {transfers} runs and evaluations that start from the '
  'weights; evaluations and checkpoints during the pre-trainings; waiting for '
  'data; compilation; steps that are repeated after a failure. A run that ends '
  'early is counted to its last step.'
)


class Cost(NamedTuple):
  """Predicted cost of the pre-trainings of a row.

  Attributes:
    runs: number of pre-trainings, one for each seed; 0 if weights are given or
      the row has no pre-training.
    transfers: number of runs and evaluations that start from their weights.
    plan: output of `plan --json` for one of them; {} if there are none.
  """

  runs: int
  transfers: int
  plan: Mapping[str, Any]

  @property
  def is_bound(self) -> bool:
    """True if the time is only a lower bound."""
    return self.plan.get('least_days') is not None

  @property
  def days(self) -> float:
    """Days of all runs, one after another; NaN if the time is unknown."""
    key = 'least_days' if self.is_bound else 'predicted_days'
    days = self.plan.get(key)
    return math.nan if days is None else self.runs * days

  @property
  def device_days(self) -> float:
    """Core-days or GPU-days of all runs; NaN if the time is unknown."""
    if self.is_bound:
      return self.days * self.plan['devices']
    days = self.plan.get('predicted_core_days')
    return math.nan if days is None else self.runs * days

  @property
  def limits(self) -> tuple[float, float]:
    """Lower and upper limit of a step's time, relative to the predicted time.

    Both are 1 without a range.
    """
    seconds = self.plan.get('predicted_step_seconds')
    low, high = self.plan.get('predicted_step_seconds_range') or (1.0, 1.0)
    return (low / seconds, high / seconds) if seconds else (1.0, 1.0)


def predict(
  study: Study,
  topology: str,
  extra_flags: ExtraFlags,
  weights: Mapping[str, str],
  plan: Callable[[Sequence[str]], dict[str, Any]] = plan_process.predict,
) -> dict[str, Cost]:
  """Plans the pre-training of each row, and starts nothing.

  Rows that differ only in the data have the same program, which is compiled
  once, because `plan` caches compiled programs.

  Args:
    study: study to plan.
    topology: devices of each run, as in `plan --topology`.
    extra_flags: flags that are added to the runs.
    weights: paths of weights that replace pre-trainings, by row.
    plan: function that plans a training with these flags.

  Returns:
    The predicted cost by row.

  Raises:
    UserError: a row cannot be planned; `plan` has printed the reason.
  """
  found = {}
  for number, (name, row) in enumerate(study.rows.items(), 1):
    runs = []
    if name not in weights:
      runs = chains.pretrainings(name, row, '', extra_flags)
    planned = {}
    if runs:
      log.info('plan %d of %d: %s', number, len(study.rows), name)
      flags = [f for f in runs[0].flags if not f.startswith('--workdir=')]
      try:
        planned = plan([*flags, f'--topology={topology}'])
      except UserError as error:
        raise UserError(f'the row {name!r}: {error}') from error
    transfers = chains.num_runs(row, name in weights) - len(runs)
    found[name] = Cost(len(runs), transfers, planned)
  return found


def markdown(study: Study, topology: str, costs: Mapping[str, Cost]) -> str:
  """Formats the costs of a study as a table, with the sum of rows that fit.

  Args:
    study: study that was planned.
    topology: devices of each run.
    costs: result of `predict`.
  """
  on_gpus = chips.parse_gpus(topology) is not None
  head = ['row', 'runs', 'fits', 'memory per device', 'steps', 's per step']
  head += ['days', 'GPU-days' if on_gpus else 'core-days']
  lines = [f'# {study.title}', '']
  lines += [f'Predicted cost of the pre-trainings on {topology}:', '']
  lines += [f'| {" | ".join(head)} |', '|---' * len(head) + '|']
  for name, cost in costs.items():
    lines.append(f'| {" | ".join([name, *_cells(cost)])} |')
  counted = [c for c in costs.values() if c.plan and c.plan['fits']]
  runs = sum(cost.runs for cost in counted)
  sums = [f'total of what fits | {runs}', *[''] * 4, *_times(counted)]
  lines.append(f'| {" | ".join(sums)} |')
  notes = [
    _hint(name, cost.plan['changes_that_fit'])
    for name, cost in costs.items()
    if cost.plan.get('changes_that_fit')
  ]
  if any(cost.is_bound for cost in costs.values()):
    notes.append(_NO_COMPILER)
  transfers = sum(cost.transfers for cost in costs.values())
  notes.append(_NOT_COUNTED.format(transfers=transfers))
  return '\n'.join([*lines, '', *notes])


def _cells(cost: Cost) -> list[str]:
  """Returns the cells of a row, without its name."""
  plan = cost.plan
  if not plan:
    return ['0', *[_UNKNOWN] * 6]
  seconds, (low, high) = plan['predicted_step_seconds'], cost.limits
  step = _UNKNOWN
  if seconds is not None:
    step = f'{seconds:.4f} ({seconds * low:.4f} to {seconds * high:.4f})'
  return [
    str(cost.runs),
    'yes' if plan['fits'] else 'no',
    memory.text(plan['peak_bytes_per_device']),
    f'{plan["total_steps"]:,}',
    step,
    *_times([cost]),
  ]


def _times(costs: Sequence[Cost]) -> list[str]:
  """Returns the sums of days and of core-days or GPU-days, as text."""
  days = math.fsum(cost.days for cost in costs)
  total = math.fsum(cost.device_days for cost in costs)
  if math.isnan(days):
    return [_UNKNOWN, _UNKNOWN]
  if any(cost.is_bound for cost in costs):
    return [f'≥ {days:,.2f}', f'≥ {total:,.1f}']
  low, high = (
    math.fsum(cost.device_days * cost.limits[end] for cost in costs)
    for end in (0, 1)
  )
  spread = f' ({low:,.1f} to {high:,.1f})' if low < high else ''
  return [f'{days:,.2f}', f'{total:,.1f}{spread}']


def _hint(name: str, changes: Mapping[str, Any]) -> str:
  """Returns the flags with which a row fits that does not fit."""
  flags = ' '.join(f'--pretrain.{key}={v}' for key, v in changes.items())
  return f'{name} fits with {flags}.\n'
