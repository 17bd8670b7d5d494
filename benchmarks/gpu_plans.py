"""Predicts memory, time and MFU of trainings on GPUs.

  python benchmarks/gpu_plans.py [PATTERN ...]

Compiles each row's training step for absent GPUs (extra `plan-gpu`; 10 to 60
seconds per row) and prints a Markdown table for benchmarks/RESULTS.md. All
times are modelled (vit_jax/plan/gpu_cost.py), not measured. PATTERN is a
regular expression that a row's name and topology must contain; if several are
given, they must contain all of them. --list shows the names.

--plain also compiles the step of the same ViT in plain Flax (plain_flax.py,
which is written like big_vision's models/vit.py) for the rows without dropout,
and compares memory and time.
"""

import argparse
import re
import sys
from typing import Any, NamedTuple

from vit_jax.plan import environment

REMAT = {'model.remat': 'none'}
VIT = 'configs/vit.py:variant='
H100 = 'h100:1x1'
NODES = ('h100:1x8', 'a100-80gb:1x8')


class Row(NamedTuple):
  """One line of the table.

  Attributes:
    name: name of the model.
    topology: value of `--topology`.
    config: config file with its arguments.
    overrides: changed keys of the config.
  """

  name: str
  topology: str
  config: str
  overrides: dict[str, Any] = {}


def _single(batch_size: int, **overrides: Any) -> dict[str, Any]:
  """Returns the overrides of a row for one GPU without dropout."""
  return {'batch_size': batch_size, 'micro_batches': 1} | overrides


CONFIGS = {
  'B/16': f'{VIT}B/16,data=i21k,gpu=80',
  'L/16': f'{VIT}L/16,data=i21k,gpu=80',
  'H/14': f'{VIT}H/14,data=jft,gpu=80',
  'S/16': 'configs/s16_i1k.py:epochs=90',
  'MAE L/16': 'configs/mae.py:model=L,gpu=80',
  'DINO S/16': 'configs/dino.py:recipe=vanilla,variant=S/16',
}
PLAIN = {'model.dropout': 0.0}
ROWS = [
  *(
    Row(
      f'{name}, no dropout', H100, CONFIGS[name], _single(batch_size, **PLAIN)
    )
    for name, batch_size in (
      ('B/16', 256),
      ('B/16', 512),
      ('L/16', 128),
      ('L/16', 256),
      ('H/14', 128),
    )
  ),
  Row('S/16', H100, CONFIGS['S/16'], _single(512)),
  Row('MAE L/16', H100, CONFIGS['MAE L/16'], _single(512)),
  Row('DINO S/16', H100, CONFIGS['DINO S/16'], _single(128) | REMAT),
  *(
    Row(
      f'{name}, recipe',
      topology,
      config,
      REMAT if name == 'DINO S/16' else {},
    )
    for topology in NODES
    for name, config in CONFIGS.items()
  ),
]
HEAD = (
  'model',
  'GPUs',
  'images per GPU (micro-batches)',
  'fits',
  'peak GB',
  'predicted step, ms (range)',
  'MFU %',
  'images/s',
  'GPU-days',
)
PLAIN_HEAD = (
  'model',
  'GPUs',
  'images per GPU',
  'peak GB: plain Flax, vit_jax',
  'ratio of GB',
  'step, ms: plain Flax, vit_jax',
  'ratio of ms',
)


def plan_here(row: Row) -> dict[str, Any]:
  """Returns the plan of a row with this tree's code."""
  from vit_jax.config import loading
  from vit_jax.plan import compile, topology

  config = compile.changed(loading.load(row.config), **row.overrides)
  return compile.plan(config, topology.find(row.topology)).to_dict()


def plan_plain(row: Row, ours: dict[str, Any]) -> dict[str, Any]:
  """Returns memory and time of a row whose step is written in plain Flax.

  Args:
    row: row of the table.
    ours: plan of the row.
  """
  import plain_flax

  from vit_jax.arrays import memory
  from vit_jax.config import loading
  from vit_jax.plan import compile, topology

  config = compile.changed(loading.load(row.config), **row.overrides)
  target = topology.find(row.topology)
  compiled = plain_flax.compiled(config, target)
  total = compile.cost_of(compiled.as_text() or '', target)
  program = memory.program_bytes(compiled)
  assert program is not None
  return ours | {
    'peak_bytes_per_device': program['peak'],
    'predicted_step_seconds': total.predicted_step_seconds,
  }


def line(row: Row, result: dict[str, Any]) -> str:
  """Returns a row of the Markdown table."""
  low, high = result['predicted_step_seconds_range']
  cells = (
    row.name,
    row.topology,
    f'{result["images_per_device"]:g} ({result["micro_batches"]})',
    'yes' if result['fits'] else 'no',
    f'{result["peak_bytes_per_device"] / 1e9:.1f}',
    f'{result["predicted_step_seconds"] * 1e3:.1f} '
    f'({low * 1e3:.1f} to {high * 1e3:.1f})',
    f'{result["predicted_mfu"] * 100:.1f}',
    f'{result["predicted_images_per_second"]:,.0f}',
    f'{result["predicted_core_days"]:,.1f}',
  )
  return f'| {" | ".join(cells)} |'


def compared(row: Row, plain: dict[str, Any], ours: dict[str, Any]) -> str:
  """Returns a row of the Markdown table of `--plain`."""

  def pair(key: str, factor: float) -> tuple[str, str]:
    cells = f'{plain[key] * factor:.1f}, {ours[key] * factor:.1f}'
    return cells, f'{ours[key] / plain[key]:.2f}'

  cells = (
    row.name,
    row.topology,
    f'{ours["images_per_device"]:g}',
    *pair('peak_bytes_per_device', 1e-9),
    *pair('predicted_step_seconds', 1e3),
  )
  return f'| {" | ".join(cells)} |'


def main() -> None:
  """Plans the rows whose names contain all patterns."""
  parser = argparse.ArgumentParser(
    description=(__doc__ or '').partition('\n')[0]
  )
  parser.add_argument('patterns', nargs='*')
  parser.add_argument('--list', action='store_true')
  parser.add_argument(
    '--plain', action='store_true', help='compare with plain Flax'
  )
  arguments = parser.parse_args()
  rows = [
    row
    for row in ROWS
    if all(
      re.search(pattern, f'{row.name} {row.topology}')
      for pattern in arguments.patterns
    )
  ]
  if arguments.plain:  # plain_flax.py is a supervised ViT without dropout
    rows = [row for row in rows if row.overrides.get('model.dropout') == 0.0]
  if arguments.list:
    for row in rows:
      print(row.name, row.topology, row.config, row.overrides)
    return
  if not environment.has_gpu_compiler():
    parser.error(f'no compiler for GPUs: {environment.GPU_EXTRA}')
  head = PLAIN_HEAD if arguments.plain else HEAD
  print(f'| {" | ".join(head)} |\n|{"---|" * len(head)}', flush=True)
  for row in rows:
    ours = plan_here(row)
    if arguments.plain:
      print(compared(row, plan_plain(row, ours), ours), flush=True)
    else:
      print(line(row, ours), flush=True)


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
