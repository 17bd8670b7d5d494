"""Formats a plan as tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.arrays import memory
from vit_jax.plan import gpu_cost
from vit_jax.plan.compile import Plan
from vit_jax.plan.environment import GPU_EXTRA

MIN_FRACTION = 1e-3  # smallest fraction of all cycles that is shown
COSTLIEST = 10
_KERNELS = {
  'product': 'products and convolutions',
  'attention': "cuDNN's attention",
  'reduction': 'reductions',
  'memory': 'all other kernels',
}
# Headers and formats of sums, by key.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
  'count': ('count', str),
  'times': ('times', str),
  'flops': ('FLOPs', '{:.3g}'.format),
  'bytes': ('bytes', memory.text),
  'seconds': ('ms', lambda seconds: f'{seconds * 1e3:.2f}'),
  'cycles': ('M cycles', lambda cycles: f'{cycles / 1e6:.2f}'),
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
_CAUSES = {
  'kernels': "kernels without the compiler's estimate",
  'exchanges': 'exchanges that nothing hides, on slower links',
}


def summary(plan: Plan, added: Mapping[str, Any] | None = None) -> str:
  """Formats memory, time and cost of a plan.

  Args:
    plan: plan of a config.
    added: results of searches and measurements, see `search.find_fit` and
      `measure.measured`.
  """
  added = added or {}
  tables = [align(_memory(plan, added))]
  if plan.cost is not None:
    # Kinds that take almost no time are left out.
    threshold = MIN_FRACTION * (plan.estimated_cycles or 0)
    uncounted = {
      kind: sums
      for kind, sums in plan.uncounted.items()
      if sums['cycles'] >= threshold
    }
    tables += [
      align([*_time(plan), *_measured(plan, added)]),
      _sums('modelled', plan.kernels),
      _sums('collective', dict(sorted(plan.collective_seconds.items()))),
      _sums('without an estimate', uncounted),
    ]
    if plan.predicted_step_seconds is not None:
      text = _GPU_ASSUMPTIONS if plan.kernels else _TPU_ASSUMPTIONS
      tables.append(text.format(**gpu_cost.EXPECTED._asdict()))
  return '\n\n'.join(table for table in tables if table)


def _memory(plan: Plan, added: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns rows about the devices, the batch and the memory."""
  mesh = ' '.join(f'{axis}={n}' for axis, n in plan.mesh.items())
  batch = (
    f'{plan.batch_size} images: {plan.images_per_device:g} per device in '
    f'{plan.micro_batches} micro-batch(es), remat {plan.remat}'
  )
  rows = [
    ('topology', f'{plan.topology}, {plan.devices} devices, {mesh}'),
    ('parameters', f'{plan.parameters:,}'),
    ('batch', batch),
  ]
  if plan.computed_by is not None:
    rows.append(('computed by', plan.computed_by))
  size, days = memory.text, plan.least_days
  fits = 'fits' if plan.fits else 'DOES NOT FIT'
  if days is not None and plan.fits:
    fits = 'state and batch fit, temporaries are unknown'
  peak, limit = plan.peak_bytes_per_device, plan.hbm_bytes_per_device
  parts = [f'{name} {size(n)}' for name, n in plan.bytes.items() if n]
  rows += [
    ('memory', f'{fits}: {size(peak)} of {size(limit)} per device'),
    ('  of which', ', '.join(parts)),
  ]
  if days is not None:
    time = f'{days:.3f} days at least, {days * plan.devices:.2f} GPU-days'
    missing = f'not installed; it predicts memory and time: {GPU_EXTRA}'
    rows += [('time', f'{time}, at peak rates'), ('compiler', missing)]
  if 'largest_batch_size' in added:
    largest = added['largest_batch_size'] or 'none: one image does not fit'
    rows.append(('  largest batch', str(largest)))
  if 'changes_that_fit' in added:
    changes = added['changes_that_fit'] or {}
    flags = ' '.join(f'--config.{k}={v}' for k, v in changes.items())
    rows.append(('  it fits with', flags or 'none of the changes tried'))
  return rows


def _measured(plan: Plan, added: Mapping[str, Any]) -> list[tuple[str, str]]:
  seconds = added.get('measured_step_seconds')
  if seconds is None:
    return []
  text = f'{seconds:,.4f}'
  if plan.predicted_step_seconds is not None:
    text += f'; predicted / measured: {plan.seconds / seconds:.2f}'
  return [
    ('measured step, s', text),
    ('measured images/s', f'{plan.batch_size / seconds:,.0f}'),
  ]


def _time(plan: Plan) -> list[tuple[str, str]]:
  """Returns rows about time and cost, as far as they are known."""
  assert plan.cost is not None
  rows = [
    ('model', f'{plan.model_flops_per_image / 1e9:.1f} GFLOPs per image'),
    ('matrix FLOPs', f'{plan.cost.matrix_flops / 1e12:.3f} T per device'),
  ]
  if plan.predicted_step_seconds_range is None:
    unknown = 'not predicted: this compiler does not estimate it'
    return [*rows, ('time', unknown)]
  seconds, limits = plan.seconds, plan.predicted_step_seconds_range

  def with_range(value: float | None, decimals: int) -> str:
    """Formats a value that is proportional to the time of a step."""
    low, high = (
      f'{(value or 0) / seconds * limit:,.{decimals}f}' for limit in limits
    )
    return f'{value:,.{decimals}f} ({low} to {high})'

  if plan.estimated_cycles is not None:
    cycles = (
      f'{plan.estimated_cycles / 1e6:,.1f} M estimated by the compiler'
      f' + {plan.cost.uncounted_cycles / 1e6:,.1f} M for instructions without '
      'its estimate'
    )
    rows.append(('cycles', cycles))
  exposed = (plan.exposed_collective_seconds or 0) * 1e3
  rows += [
    ('exchanges', f'{exposed:.1f} ms not hidden by other work'),
    ('step, s', with_range(seconds, 4)),
  ]
  if plan.uncertain_seconds is not None:
    rows.append(('  range from', _uncertain(plan.uncertain_seconds)))
  paper = ''
  if plan.paper_core_days:
    paper = f'; paper: {plan.paper_core_days:,.0f} TPUv3 core-days'
  return [
    *rows,
    ('images/s', f'{plan.predicted_images_per_second:,.0f}'),
    ('MFU', f'{plan.predicted_mfu:.1%}'),
    ('steps', f'{plan.total_steps:,}'),
    ('days', with_range(plan.predicted_days, 2)),
    (
      'GPU-days' if plan.kernels else 'core-days',
      with_range(plan.predicted_core_days, 1) + paper,
    ),
  ]


def _uncertain(seconds: Mapping[str, tuple[float, float]]) -> str:
  """Returns by how much each cause can change the time of a step, as text."""
  causes = [
    f'{_CAUSES[cause]}: {low * 1e3:+.1f} to {high * 1e3:+.1f} ms'
    for cause, (low, high) in seconds.items()
    if low or high
  ]
  return '; '.join(causes) or 'nothing: the compiler estimates all instructions'


def _sums(title: str, sums: Mapping[str, Mapping[str, Any]]) -> str:
  """Formats sums over instructions, by their kind; '' without sums."""
  if not sums:
    return ''
  columns = [key for key in _COLUMNS if key in [*sums.values()][0]]
  rows = [[title, *(_COLUMNS[key][0] for key in columns)]]
  for kind, values in sums.items():
    if values.get('overlapped'):
      kind += ' (overlaps with other work, not added)'
    cells = [_COLUMNS[key][1](values[key]) for key in columns]
    rows.append([_KERNELS.get(kind, kind), *cells])
  return align(rows, right=range(1, len(rows[0])))


def costliest(plan: Plan) -> list[dict[str, Any]]:
  """Returns the groups of instructions that take the longest.

  The time of a group is its estimated `cycles` on TPUs and its modelled
  `seconds` on GPUs; `share` is its fraction of all groups.
  """
  if plan.cost is None:
    return []
  unit = 'seconds' if plan.cost.kernels else 'cycles'
  total = sum(plan.cost.groups.values()) or 1
  groups = sorted(plan.cost.groups.items(), key=lambda item: -item[1])
  return [
    {'group': module, 'pass': direction, unit: time, 'share': time / total}
    for (module, direction), time in groups[:COSTLIEST]
  ]


def breakdown(plan: Plan) -> str:
  """Formats the groups of `costliest` as a table."""
  groups = costliest(plan)
  if not groups:
    return 'costliest operations: unknown, because nothing estimates their time'
  rows = [('costliest operations', 'pass', 'M cycles', 'fraction')]
  if 'seconds' in groups[0]:
    rows = [('costliest operations', 'pass', 'ms', 'fraction')]
  for group in groups:
    time = f'{group.get("cycles", 0) / 1e6:,.1f}'
    if 'seconds' in group:
      time = f'{group["seconds"] * 1e3:,.2f}'
    rows.append((group['group'], group['pass'], time, f'{group["share"]:.1%}'))
  return align(rows, right=(2, 3))


def choices(plans: Sequence[Plan]) -> str:
  """Formats one line for each plan, in the given order."""
  rows = [('remat', 'unroll', 'micro-batches', 'mesh', 'memory', 'step', 'MFU')]
  for plan in plans:
    mfu = plan.predicted_mfu
    rows.append(
      (
        str(plan.remat),
        str(plan.unroll),
        str(plan.micro_batches),
        ' '.join(f'{axis}={n}' for axis, n in plan.mesh.items()),
        memory.text(plan.peak_bytes_per_device),
        f'{plan.seconds:.4f} s',
        f'{mfu:.1%}' if mfu else '',
      )
    )
  return align(rows, right=(1, 2, 4, 5, 6))


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
