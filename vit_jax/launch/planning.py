"""Runs `plan` before any machine is requested."""

import math
from typing import Any

from vit_jax.cli import plan_process
from vit_jax.errors import UserError
from vit_jax.launch.job import Job

_GIB = 2**30
# Assumptions on the duration of a save after a signal. First the processes
# agree, within 120 s, on the step to save, and finish it. Then each host writes
# its part of the state; all known buckets are faster than this rate.
_AGREE_S = 180
_SAVE_BYTES_PER_S = 100e6


def predict(job: Job) -> dict[str, Any]:
  """Returns the output of `python -m vit_jax.plan --json` for this job.

  Raises:
    UserError: the job cannot be planned; `plan` has printed the reason.
  """
  try:
    return plan_process.predict(
      [
        f'--config={job.config}',
        *job.overrides,
        f'--topology={job.topology.name}',
        f'--slices={job.slices}',
      ]
    )
  except UserError as error:
    raise UserError(f'{error} --force starts without a plan.') from error


def summary(result: dict[str, Any]) -> str:
  """Formats whether the job fits into memory, its duration and its cost."""
  peak, limit = result['peak_bytes_per_device'], result['hbm_bytes_per_device']
  fits = 'fits' if result['fits'] else 'DOES NOT FIT'
  least_days = result['least_days']
  if least_days is not None and result['fits']:
    fits = 'state and batch fit (without compiling for GPUs)'
  lines = [
    f'plan: {fits} on {result["topology"]}, {result["devices"]} devices: '
    f'{_size(peak)} of {_size(limit)} per device'
  ]
  seconds, days = result['predicted_step_seconds'], result['predicted_days']
  if seconds is not None:
    paper = result['paper_core_days']
    on_gpus = bool(result.get('kernels'))
    unit, source = 'core-days', 'paper'
    if on_gpus:
      unit, source = 'GPU-days', 'paper, TPUv3 core-days'
    reference = f' ({source}: {paper:,.0f})' if paper else ''
    lines.append(
      f'plan: {result["total_steps"]:,} steps of {seconds:.3f} s at '
      f'{result["predicted_mfu"]:.0%} MFU: {days:,.1f} days, '
      f'{result["predicted_core_days"]:,.0f} {unit}{reference}'
    )
  if least_days is not None:
    lines.append(
      f'plan: {result["total_steps"]:,} steps in at least {least_days:,.1f} '
      'days, at the peak rate of all GPUs; expect two or three times as many'
    )
  for key, value in (result.get('changes_that_fit') or {}).items():
    lines.append(f'plan: it fits with --config.{key}={value}')
  if result.get('largest_batch_size'):
    lines.append(
      f'plan: the largest batch size is {result["largest_batch_size"]}'
    )
  return '\n'.join(lines)


def _size(number: int | None) -> str:
  return 'unknown' if number is None else f'{number / _GIB:.1f} GiB'


def check_fit(result: dict[str, Any]) -> None:
  """Checks that the job fits into the memory of the devices.

  Raises:
    UserError: the devices do not have enough memory.
  """
  if not result['fits']:
    raise UserError(
      'the run does not fit into the memory of the devices (see above), so '
      'nothing was started. Change the config or --topology, or give --force.'
    )


def grace_s(result: dict[str, Any] | None, per_host: int) -> int:
  """Returns enough time for the trainer to save its state, in seconds.

  Args:
    result: result of `predict`; None if nothing was planned.
    per_host: number of devices per host.
  """
  sizes = (result or {}).get('bytes', {})
  state = sum(sizes.get(k, 0) for k in ('parameters', 'optimizer', 'average'))
  seconds = _AGREE_S + state * per_host / _SAVE_BYTES_PER_S
  return max(300, 60 * math.ceil(seconds / 60))
