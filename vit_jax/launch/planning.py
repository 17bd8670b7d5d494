"""Asks `plan` before anything is paid for."""

import json
import math
import subprocess
import sys
from typing import Any

from vit_jax.errors import UserError
from vit_jax.launch.job import Job

_GIB = 2**30
# For a save after a signal: the processes agree (at most 120 s) at the end of a
# step, then each host writes its share. No known bucket is slower.
_AGREE_S = 180
_SAVE_BYTES_PER_S = 100e6


def ask(job: Job) -> dict[str, Any]:
  """Returns the output of `python -m vit_jax.plan --json` for this job.

  Raises:
    UserError: the job cannot be planned; the planner has printed the reason.
  """
  command = [
    *(sys.executable, '-m', 'vit_jax.plan', '--json'),
    *(f'--config={job.config}', *job.overrides),
    *(f'--topology={job.topology.name}', f'--slices={job.slices}'),
  ]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if done.returncode:
    raise UserError(
      f'plan ended with exit code {done.returncode}; its message is above. '
      'Nothing was started; --force starts without a plan.'
    )
  return json.loads(done.stdout.splitlines()[-1])


def summary(result: dict[str, Any]) -> str:
  """Describes whether the job fits, its duration and its cost."""
  peak, limit = result['peak_bytes_per_device'], result['hbm_bytes_per_device']
  verdict = 'fits' if result['fits'] else 'DOES NOT FIT'
  least = result['least_days']
  if least is not None and result['fits']:
    verdict = 'state and batch fit (nothing compiles for GPUs here)'
  lines = [
    f'plan: {verdict} on {result["topology"]}, {result["devices"]} devices: '
    f'{_size(peak)} of {_size(limit)} a device'
  ]
  seconds, days = result['predicted_step_seconds'], result['predicted_days']
  if seconds is not None:
    paper = result['paper_core_days']
    beside = f' (the paper paid {paper:,.0f})' if paper else ''
    lines.append(
      f'plan: {result["total_steps"]:,} steps of {seconds:.3f} s at '
      f'{result["predicted_mfu"]:.0%} MFU: {days:,.1f} days, '
      f'{result["predicted_core_days"]:,.0f} core-days{beside}'
    )
  if least is not None:
    lines.append(
      f'plan: {result["total_steps"]:,} steps in {least:,.1f} days at least, '
      'at the peak of all GPUs; expect two or three times that'
    )
  for key, value in (result.get('changes_that_fit') or {}).items():
    lines.append(f'plan: it fits with --config.{key}={value}')
  if result.get('largest_batch_size'):
    lines.append(f'plan: the largest batch is {result["largest_batch_size"]}')
  return '\n'.join(lines)


def _size(number: int | None) -> str:
  return 'unknown' if number is None else f'{number / _GIB:.1f} GiB'


def refuse_what_does_not_fit(result: dict[str, Any]) -> None:
  """Raises UserError where the plan says that a device is too small."""
  if not result['fits']:
    raise UserError(
      'the plan says that it does not fit (see above), so nothing was started. '
      'Change the config or --topology, or give --force.'
    )


def grace_s(result: dict[str, Any] | None, per_host: int) -> int:
  """Seconds that the trainer needs from a signal to its end, generously.

  Args:
    result: result of `ask`; None if nothing was planned.
    per_host: devices of one host.
  """
  sizes = (result or {}).get('bytes', {})
  state = sum(sizes.get(k, 0) for k in ('parameters', 'optimizer', 'average'))
  seconds = _AGREE_S + state * per_host / _SAVE_BYTES_PER_S
  return max(300, 60 * math.ceil(seconds / 60))
