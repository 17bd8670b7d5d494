"""Formats a plan as tables."""

from collections.abc import Sequence
from typing import Any

from vit_jax.arrays import memory
from vit_jax.arrays.columns import align
from vit_jax.plan import gpu_cost, gpus
from vit_jax.plan.evaluate import Plan

MIN_FRACTION = 1e-3  # smallest fraction of all cycles that is shown
COSTLIEST = 10


def summary(plan: Plan) -> str:
  """Formats memory, time and cost of a plan."""
  result = plan.result
  parts = [align([*_setting(result), *_memory(result)])]
  if result['kernels']:
    parts += [align(_modelled(result)), _kernels(result), _exchanges(result)]
    parts.append(_assumptions())
  elif result['flops_per_device'] is not None:
    parts += [align(_time(result)), _exchanges(result), _uncounted(result)]
  return '\n\n'.join(part for part in parts if part)


def _setting(result: dict[str, Any]) -> list[tuple[str, str]]:
  mesh = ' '.join(f'{axis}={n}' for axis, n in result['mesh'].items())
  batch = (
    f'{result["batch_size"]} images: {result["images_per_device"]:g} per device'
    f' in {result["micro_batches"]} micro-batch(es), remat {result["remat"]}'
  )
  rows = [
    ('topology', f'{result["topology"]}, {result["devices"]} devices, {mesh}'),
    ('parameters', f'{result["parameters"]:,}'),
    ('batch', batch),
  ]
  if result['computed_by'] is not None:
    rows.append(('computed by', result['computed_by']))
  return rows


def _memory(result: dict[str, Any]) -> list[tuple[str, str]]:
  size = memory.text
  parts = ', '.join(
    f'{name} {size(n)}' for name, n in result['bytes'].items() if n
  )
  fits = 'fits' if result['fits'] else 'DOES NOT FIT'
  peak, limit = result['peak_bytes_per_device'], result['hbm_bytes_per_device']
  days = result['least_days']
  if days is not None and result['fits']:
    fits = 'state and batch fit, temporaries are unknown'
  rows = [('memory', f'{fits}: {size(peak)} of {size(limit)} per device')]
  rows.append(('  of which', parts))
  if days is not None:
    gpu_days = days * result['devices']
    time = f'{days:.3f} days at least, {gpu_days:.2f} GPU-days, at peak rates'
    missing = f'not installed; it predicts memory and time: {gpus.EXTRA}'
    rows += [('time', time), ('compiler', missing)]
  if 'largest_batch_size' in result:
    largest = result['largest_batch_size']
    rows.append(
      ('  largest batch', str(largest or 'none: one image does not fit'))
    )
  if 'changes_that_fit' in result:
    changes = result['changes_that_fit'] or {}
    flags = ' '.join(f'--config.{k}={v}' for k, v in changes.items())
    rows.append(('  it fits with', flags or 'none of the changes tried'))
  return rows


def _time(result: dict[str, Any]) -> list[tuple[str, str]]:
  """Returns rows about time, as far as the compiler estimates it."""
  rows = [
    ('model', f'{result["model_flops_per_image"] / 1e9:.1f} GFLOPs per image'),
    ('matrix FLOPs', f'{result["flops_per_device"] / 1e12:.3f} T per device'),
  ]
  seconds = result['predicted_step_seconds']
  if seconds is None:
    unknown = 'not predicted: this compiler does not estimate it'
    return [*rows, ('time', unknown)]
  paper = result['paper_core_days']
  in_paper = f' (paper: {paper:,.0f})' if paper else ''
  added = result['uncounted_cycles'] / 1e6
  cycles = (
    f'{result["estimated_cycles"] / 1e6:,.1f} M estimated by the compiler'
    f' + {added:,.1f} M for instructions without its estimate'
  )
  exposed, days = result['exposed_collective_seconds'], result['predicted_days']
  low, high = result['predicted_step_seconds_range']
  return [
    *rows,
    ('cycles', cycles),
    ('exchanges', f'{exposed * 1e3:.1f} ms not hidden by other work'),
    ('step', f'{seconds:.4f} s ({low:.4f} to {high:.4f})'),
    ('  range from', _uncertain(result['uncertain_seconds'])),
    ('images/s', f'{result["predicted_images_per_second"]:,.0f}'),
    ('MFU', f'{result["predicted_mfu"]:.1%}'),
    ('training', f'{result["total_steps"]:,} steps, {days:.2f} days'),
    ('core-days', f'{result["predicted_core_days"]:,.1f}{in_paper}'),
  ]


def _uncertain(seconds: dict[str, tuple[float, float]]) -> str:
  """Returns by how much each part can change the time of a step, as text."""
  words = {
    'kernels': "kernels without the compiler's estimate",
    'exchanges': 'exchanges that nothing hides, on slower links',
  }
  return (
    '; '.join(
      f'{words[cause]}: {low * 1e3:+.1f} to {high * 1e3:+.1f} ms'
      for cause, (low, high) in seconds.items()
      if low or high
    )
    or 'nothing: the compiler estimates all instructions'
  )


def _modelled(result: dict[str, Any]) -> list[tuple[str, str]]:
  """Returns rows about the modelled time on GPUs."""
  seconds = result['predicted_step_seconds']
  days, gpu_days = result['predicted_days'], result['predicted_core_days']
  # Limits of the range, relative to the predicted time.
  low, high = (t / seconds for t in result['predicted_step_seconds_range'])
  paper = result['paper_core_days']
  in_paper = f'; paper, TPUv3 core-days: {paper:,.0f}' if paper else ''
  exposed = result['exposed_collective_seconds']
  return [
    ('model', f'{result["model_flops_per_image"] / 1e9:.1f} GFLOPs per image'),
    ('matrix FLOPs', f'{result["flops_per_device"] / 1e12:.3f} T per GPU'),
    ('exchanges', f'{exposed * 1e3:.1f} ms not hidden by kernels'),
    (
      'step',
      f'{seconds:.4f} s ({seconds * low:.4f} to {seconds * high:.4f})',
    ),
    ('images/s', f'{result["predicted_images_per_second"]:,.0f}'),
    ('MFU', f'{result["predicted_mfu"]:.1%}'),
    (
      'training',
      f'{result["total_steps"]:,} steps, {days:.2f} days '
      f'({days * low:.2f} to {days * high:.2f})',
    ),
    (
      'GPU-days',
      f'{gpu_days:,.1f} ({gpu_days * low:,.1f} to {gpu_days * high:,.1f}'
      f'{in_paper})',
    ),
  ]


def _assumptions() -> str:
  """Returns the assumptions about the time on GPUs, as text."""
  rates = gpu_cost.EXPECTED
  return (
    'All times are modelled from the compiled program, not measured: products '
    f'at {rates.product:.0%} of the\npeak FLOP/s, attention at '
    f'{rates.attention:.0%}, other kernels at {rates.memory:.0%} of the memory '
    f'bandwidth, exchanges at\n{rates.link:.0%} of the link rates. Input, '
    'evaluations and checkpoints are not included.'
  )


def _kernels(result: dict[str, Any]) -> str:
  """Returns the table of the modelled kernels; '' if none were modelled."""
  names = {
    'product': 'products and convolutions',
    'attention': "cuDNN's attention",
    'memory': 'all other kernels',
  }
  rows = [('modelled', 'count', 'TFLOPs', 'bytes', 'ms')]
  for kind, total in result['kernels'].items():
    rows.append(
      (
        names[kind],
        str(total['count']),
        f'{total["flops"] / 1e12:.2f}',
        memory.text(total['bytes']),
        f'{total["seconds"] * 1e3:.1f}',
      )
    )
  return align(rows, right=(1, 2, 3, 4)) if len(rows) > 1 else ''


def _exchanges(result: dict[str, Any]) -> str:
  if not result['collectives']:
    return ''
  rows = [('collective', 'count', 'bytes', 'ms')]
  for kind, total in sorted(result['collective_seconds'].items()):
    rows.append(
      (
        kind,
        str(total['count']),
        memory.text(total['bytes']),
        f'{total["seconds"] * 1e3:.2f}',
      )
    )
  return align(rows, right=(1, 2, 3))


def _uncounted(result: dict[str, Any]) -> str:
  """Returns the table of instructions without an estimate."""
  threshold = MIN_FRACTION * (result['estimated_cycles'] or 0)
  rows = [('without an estimate', 'times', 'bytes', 'FLOPs', 'M cycles', '')]
  for kind, total in result['uncounted'].items():
    if total['cycles'] >= threshold:
      overlaps = 'overlaps with other work, not added'
      rows.append(
        (
          kind,
          str(total['times']),
          memory.text(total['bytes']),
          f'{total["flops"]:.3g}',
          f'{total["cycles"] / 1e6:.2f}',
          overlaps if total['overlapped'] else '',
        )
      )
  return align(rows, right=(1, 2, 3, 4)) if len(rows) > 1 else ''


def costliest(plan: Plan) -> list[dict[str, Any]]:
  """Returns the groups of instructions that take the longest.

  The time of a group is its estimated `cycles` on TPUs and its modelled
  `seconds` on GPUs; `share` is its fraction of all groups.
  """
  if plan.cost is None:
    return []
  unit = 'seconds' if isinstance(plan.cost, gpu_cost.GpuCost) else 'cycles'
  total = sum(plan.cost.groups.values()) or 1
  groups = sorted(plan.cost.groups.items(), key=lambda item: -item[1])
  return [
    {'group': module, 'pass': direction, unit: time, 'share': time / total}
    for (module, direction), time in groups[:COSTLIEST]
  ]


def breakdown(plan: Plan) -> str:
  """Formats the groups of `costliest` as a table."""
  on_gpus = isinstance(plan.cost, gpu_cost.GpuCost)
  header = 'ms' if on_gpus else 'M cycles'
  rows = [('costliest operations', 'pass', header, 'fraction')]
  for group in costliest(plan):
    if on_gpus:
      time = f'{group["seconds"] * 1e3:,.2f}'
    else:
      time = f'{group["cycles"] / 1e6:,.1f}'
    rows.append((group['group'], group['pass'], time, f'{group["share"]:.1%}'))
  return align(rows, right=(2, 3))


def choices(plans: Sequence[Plan]) -> str:
  """Formats one line for each plan, in the given order."""
  rows = [('remat', 'unroll', 'micro-batches', 'mesh', 'memory', 'step', 'MFU')]
  for plan in plans:
    result = plan.result
    mfu = result['predicted_mfu']
    rows.append(
      (
        str(result['remat']),
        str(result['unroll']),
        str(result['micro_batches']),
        ' '.join(f'{axis}={n}' for axis, n in result['mesh'].items()),
        memory.text(result['peak_bytes_per_device']),
        f'{plan.seconds:.4f} s',
        f'{mfu:.1%}' if mfu else '',
      )
    )
  return align(rows, right=(1, 2, 4, 5, 6))
