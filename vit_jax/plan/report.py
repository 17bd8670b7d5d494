"""Formats a plan as tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.arrays import memory
from vit_jax.plan import gpu_cost
from vit_jax.plan.compile import Plan

COSTLIEST = 10
# Photographs of ImageNet that a core reads, decodes and crops in a second; see
# "Input" in benchmarks/RESULTS.md.
DECODED_PER_CORE = 750
# Keys of the object of `--json` that `--search` prints for each choice.
CHOICE = (
  'remat',
  'unroll',
  'micro_batches',
  'mesh',
  'peak_bytes_per_device',
  'predicted_step_seconds',
  'predicted_mfu',
  'estimated_cycles',
)
_KERNELS = {
  'product': 'products and convolutions',
  'attention': "cuDNN's attention",
  'reduction': 'reductions',
  'memory': 'all other kernels',
}


def _mesh(sizes: Mapping[str, int]) -> str:
  return ' '.join(f'{axis}={n}' for axis, n in sizes.items())


def _ms(seconds: float) -> str:
  return f'{seconds * 1e3:,.2f}'


def _millions(cycles: float) -> str:
  return f'{cycles / 1e6:,.2f}'


# Headers and formats of the columns of tables, by key; others are shown as they
# are.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
  'flops': ('FLOPs', '{:.3g}'.format),
  'bytes': ('bytes', memory.text),
  'seconds': ('ms', _ms),
  'cycles': ('M cycles', _millions),
  'share': ('fraction', '{:.1%}'.format),
  'mesh': ('mesh', _mesh),
  'peak_bytes_per_device': ('memory', memory.text),
  'predicted_step_seconds': ('step, ms', _ms),
  'predicted_mfu': ('MFU', '{:.1%}'.format),
  'estimated_cycles': ('M cycles', _millions),
}
_TPU_ASSUMPTIONS = """\
The time is the TPU compiler's estimate. Input, evaluations and checkpoints are
not included: the published training of S/16 in big_vision on v3-8, with all of
them, took 15 % longer than the step of similar code is predicted to take
(benchmarks/RESULTS.md)."""
_GPU_ASSUMPTIONS = """\
All times are modelled from the compiled program, not measured: products and
attention at the fraction of the peak FLOP/s that this family of GPUs is known
to reach, reductions at {reduction:.0%} and other kernels at {memory:.0%} of the
memory bandwidth, as fitted to an H200; exchanges at {link:.0%} of the link
rates. Input, evaluations and checkpoints are not included."""


def price(plan: Plan, per_hour: float) -> float | None:
  """Returns the price of the training; None if its time is unknown.

  Args:
    plan: plan of a config.
    per_hour: price of a device and hour.
  """
  days = plan.predicted_days
  return None if days is None else 24 * days * plan.devices * per_hour


def summary(plan: Plan, added: Mapping[str, Any] | None = None) -> str:
  """Formats memory, time and cost of a plan.

  Args:
    plan: plan of a config.
    added: values of the further keys of the JSON object, if they exist:
      `choices` of a search, `breakdown`, `price_per_hour` and `price`.
  """
  added, cost = added or {}, plan.cost
  tables = [_memory(plan, added)]
  if plan.text and plan.fits:  # otherwise, there is no program to run
    kernels = {_KERNELS[kind]: sums for kind, sums in cost.kernels.items()}
    exchanges = dict(sorted(cost.collective_seconds.items()))
    tables += [
      _time(plan, added),
      _sums('modelled', kernels),
      _sums('collective', exchanges),
    ]
    if cost.predicted_step_seconds is not None:
      text = _GPU_ASSUMPTIONS if cost.kernels else _TPU_ASSUMPTIONS
      tables.append(text.format(**gpu_cost.EXPECTED._asdict()))
  if 'choices' in added:
    tables += ['choices that fit, cheapest first', table(added['choices'])]
  if 'breakdown' in added:
    tables += ['costliest operations', table(added['breakdown']) or 'unknown']
  return '\n\n'.join(filter(None, tables))


def _memory(plan: Plan, added: Mapping[str, Any]) -> str:
  """Formats devices, batch and memory."""
  size = memory.text
  fits = 'fits' if plan.fits else 'DOES NOT FIT'
  peak, limit = plan.peak_bytes_per_device, plan.hbm_bytes_per_device
  parts = [f'{name} {size(n)}' for name, n in plan.bytes.items() if n]
  if not plan.fits and 'choices' not in added:
    fits += ' (--search finds settings that fit)'
  rows = {
    'topology': f'{plan.topology}, {plan.devices} devices, {_mesh(plan.mesh)}',
    'parameters': f'{plan.parameters:,}',
    'batch': f'{plan.batch_size} images: {plan.images_per_device:g} per device '
    f'in {plan.micro_batches} micro-batch(es), remat {plan.remat}',
    'computed by': plan.computed_by,
    'memory': f'{fits}: {size(peak)} of {size(limit)} per device',
    '  of which': ', '.join(parts),
  }
  return align([(k, str(v)) for k, v in rows.items() if v is not None])


def _time(plan: Plan, added: Mapping[str, Any]) -> str:
  """Formats time and cost, as far as they are known."""
  cost = plan.cost
  rows = {'model': f'{plan.model_flops_per_image / 1e9:.1f} GFLOPs per image'}
  limits = cost.predicted_step_seconds_range
  if limits is None:
    rows['time'] = 'not predicted: this compiler does not estimate it'
    return align([*rows.items()])

  def with_range(value: float | None, decimals: int) -> str:
    """Formats a value that is proportional to the time of a step."""
    value = value or 0.0
    low, high = (
      f'{value / plan.seconds * limit:,.{decimals}f}' for limit in limits
    )
    return f'{value:,.{decimals}f} ({low} to {high})'

  exposed = (cost.exposed_collective_seconds or 0) * 1e3
  rows['exchanges'] = f'{exposed:.1f} ms not hidden by other work'
  rows['step, s'] = with_range(plan.seconds, 4)
  rows |= {
    'images/s': f'{plan.predicted_images_per_second:,.0f}',
    'MFU': f'{plan.predicted_mfu:.1%}',
    'steps': f'{plan.total_steps:,}',
    'days': with_range(plan.predicted_days, 2),
  }
  unit = 'GPU-days' if cost.kernels else 'core-days'
  rows[unit] = with_range(plan.predicted_core_days, 1)
  if plan.paper_core_days:
    rows['paper'] = f'{plan.paper_core_days:,.0f} TPUv3 core-days'
  if (per_hour := added.get('price_per_hour')) is not None:
    total = with_range(price(plan, per_hour), 2)
    rows['price'] = f'{total}, at {per_hour:g} per device and hour'
  cores = (plan.predicted_images_per_second or 0.0) / DECODED_PER_CORE
  rows['input'] = (
    f'{math.ceil(cores):,} CPU cores in total, if each reads and crops '
    f'{DECODED_PER_CORE} photographs/s, as in benchmarks/RESULTS.md'
  )
  return align([*rows.items()])


def _sums(title: str, sums: Mapping[str, Mapping[str, Any]]) -> str:
  """Formats sums over instructions, by their kind; '' without sums."""
  shown = ('count', 'flops', 'bytes', 'seconds')
  return table(
    [
      {title: kind} | {key: values[key] for key in shown if key in values}
      for kind, values in sums.items()
    ]
  )


def costliest(plan: Plan) -> list[dict[str, Any]]:
  """Returns the groups of instructions that take the longest.

  The time of a group is its estimated `cycles` on TPUs and its modelled
  `seconds` on GPUs; `share` is its fraction of all groups. Without either, the
  list is empty.
  """
  unit = 'seconds' if plan.cost.kernels else 'cycles'
  total = sum(plan.cost.groups.values()) or 1
  groups = sorted(plan.cost.groups.items(), key=lambda item: -item[1])
  return [
    {'group': module, 'pass': direction, unit: time, 'share': time / total}
    for (module, direction), time in groups[:COSTLIEST]
  ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Formats rows with equal keys; '' without rows.

  Args:
    rows: values by key; the headers and formats of keys are in `_COLUMNS`.
  """
  if not rows:
    return ''
  columns = {key: _COLUMNS.get(key, (key, str)) for key in rows[0]}
  cells = [[header for header, _ in columns.values()]]
  for row in rows:
    cells.append(
      [
        '' if row[key] is None else form(row[key])
        for key, (_, form) in columns.items()
      ]
    )
  numbers = [isinstance(value, int | float) for value in rows[0].values()]
  return align(cells, [i for i, is_number in enumerate(numbers) if is_number])


def align(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
  """Pads cells so that columns line up, two spaces apart.

  Args:
    rows: rows of cells; all rows have the same length.
    right: indices of the columns that are aligned to the right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

  def cell(text: str, column: int) -> str:
    width = widths[column]
    return text.rjust(width) if column in right else text.ljust(width)

  return '\n'.join(
    '  '.join(cell(text, i) for i, text in enumerate(row)).rstrip()
    for row in rows
  )
