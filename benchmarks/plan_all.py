"""Predicts figures of many trainings on TPUs.

  python benchmarks/plan_all.py [PATTERN ...]

Compiles each row's training step for its topology, one after another (a minute
each on a free core), and prints a Markdown table for benchmarks/RESULTS.md.
PATTERN is a regular expression that a row's name must contain; if several are
given, it must contain all of them. --list shows the names. A row consists of a
config, a topology and overrides; --list also prints the command that plans only
this row.

`reference` is the same compiler's figure for one step of a well-known public
JAX ViT: Adam with a bfloat16 first moment, clipping, bfloat16, no dropout.
"""

import argparse
import re
import sys
from typing import Any, NamedTuple

from vit_jax.plan import environment

I21K = 'configs/l16_i21k.py'
TUNED = 'configs/finetune_imagenet.py'


class Row(NamedTuple):
  """One line of the table.

  Attributes:
    name: name of the row.
    config: config file with its arguments.
    topology: value of `--topology`.
    overrides: changed keys of the config.
    reference: M cycles of the reference on the same topology, if known.
  """

  name: str
  config: str
  topology: str
  overrides: dict[str, Any]
  reference: float | None = None

  @property
  def command(self) -> str:
    """Returns the command that plans only this row."""
    flags = ''.join(f' --config.{k}={v}' for k, v in self.overrides.items())
    return (
      f'python -m vit_jax.plan --config={self.config} '
      f'--topology={self.topology}{flags}'
    )


def _i21k(variant: str) -> str:
  return f'configs/vit.py:variant={variant},data=i21k'


PLAIN = {'model.dropout': 0.0}
SMALL = PLAIN | {
  'model.variant': 'S/16',
  'batch_size': 1024,
  'micro_batches': 1,
  'model.remat': 'none',
}
SCANNED = PLAIN | {'model.unroll': 1}
ROWS = [
  Row('L/16', I21K, 'v3:4x4', PLAIN, 1387),
  Row('L/16 as shipped', I21K, 'v3:4x4', {}),
  Row('L/16 scanned', I21K, 'v3:4x4', SCANNED, 1387),
  Row('L/16 no ZeRO-1', I21K, 'v3:4x4', PLAIN | {'mesh.zero1': False}, 1387),
  Row(
    'L/16 XLA attention',
    I21K,
    'v3:4x4',
    SCANNED | {'model.attention': 'xla'},
    1387,
  ),
  Row('B/16', _i21k('B/16'), 'v3:4x4', PLAIN, 424),
  Row('B/16 as shipped', _i21k('B/16'), 'v3:4x4', {}),
  Row('B/32', _i21k('B/32'), 'v3:4x4', PLAIN, 107),
  Row('L/32', _i21k('L/32'), 'v3:4x4', PLAIN),
  Row('S/16', I21K, 'v3:2x2', SMALL, 171),
  Row('L/16 v5e', I21K, 'v5e:8x8', PLAIN | {'micro_batches': 1}, 363),
  Row('H/14 JFT', 'configs/vit.py:variant=H/14,data=jft', 'v3:4x4', {}),
  Row(
    'H/14 JFT x1',
    'configs/vit.py:variant=H/14,data=jft',
    'v3:8x8',
    {'micro_batches': 1},
  ),
  Row(
    'g/14 JFT x1',
    'configs/vit.py:variant=H/14,data=jft',
    'v5p:4x4x4',
    {'model.variant': 'g/14', 'micro_batches': 1},
  ),
  Row('L/16 to 384 px', TUNED, 'v3:4x4', {'model.variant': 'L/16'}),
  Row(
    'L/16 to 384 px x4',
    TUNED,
    'v3:2x2',
    {'model.variant': 'L/16', 'micro_batches': 4},
  ),
  Row('L/16 to 512 px', f'{TUNED}:table=2,variant=L/16', 'v3:4x4', {}),
  Row('H/14 to 518 px', f'{TUNED}:table=2,variant=H/14', 'v3:4x4', {}),
  # The rows of Table 3 that are not plain ViTs, and other models.
  *(
    Row(variant, f'configs/resnet.py:variant={variant}', 'v3:4x4', {})
    for variant in ('R50x1', 'R50x2', 'R101x1', 'R152x1', 'R152x2', 'R200x3')
  ),
  *(
    Row(variant, f'configs/vit.py:variant={variant},data=jft', 'v3:4x4', {})
    for variant in ('R50+B/32', 'R50+B/16', 'R50+L/32', 'R50+L/16')
  ),
  *(
    Row(
      f'Swin-{variant}', f'configs/swin_i1k.py:variant={variant}', 'v3:4x4', {}
    )
    for variant in ('T', 'S', 'B')
  ),
  *(
    Row(f'Axial {name}', f'examples/axial.py:variant={name}', 'v3:4x4', {})
    for name in ('B/32', 'B/16', 'R50')
  ),
]
COLUMNS = (
  'row',
  'topology',
  'fits',
  'GiB per device',
  'M cycles',
  "kernels' part",
  'reference',
  'ratio',
  'exchanges ms',
  'step s',
  'img/s',
  'MFU %',
  'core-days',
  'compile s',
)


def run(row: Row) -> dict[str, Any]:
  """Plans a row."""
  from vit_jax.config import loading
  from vit_jax.plan import topology
  from vit_jax.plan.compile import changed, plan

  config = changed(loading.load(row.config), **row.overrides)
  made = plan(config, topology.find(row.topology))
  return made.to_dict() | {
    'row': row.name,
    'reference_mcycles': row.reference,
  }


def line(result: dict[str, Any]) -> str:
  """Returns a row of the Markdown table."""

  def number(key: str, factor: float = 1.0, digits: int = 1) -> str:
    value = result.get(key)
    return '' if value is None else f'{value * factor:,.{digits}f}'

  cycles, reference = result['estimated_cycles'], result['reference_mcycles']
  if cycles:
    cycles += result['uncounted_cycles']
    result = result | {'cycles': cycles}
  ratio = f'{cycles / 1e6 / reference:.2f}' if cycles and reference else ''
  cells = (
    result['row'],
    result['topology'],
    'yes' if result['fits'] else 'no',
    number('peak_bytes_per_device', 2**-30, 2),
    number('cycles', 1e-6),
    number('uncounted_cycles', 1e-6),
    number('reference_mcycles', digits=0),
    ratio,
    number('exposed_collective_seconds', 1e3),
    number('predicted_step_seconds', digits=3),
    number('predicted_images_per_second', digits=0),
    number('predicted_mfu', 100),
    number('predicted_core_days'),
    number('compile_seconds', digits=0),
  )
  return '| ' + ' | '.join(cells) + ' |'


def main() -> None:
  """Plans the rows whose names contain all patterns."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('patterns', nargs='*')
  parser.add_argument('--list', action='store_true')
  arguments = parser.parse_args()
  rows = [
    row
    for row in ROWS
    if all(re.search(pattern, row.name) for pattern in arguments.patterns)
  ]
  if arguments.list:
    print('\n'.join(f'{row.name}: {row.command}' for row in rows))
    return
  print('| ' + ' | '.join(COLUMNS) + ' |')
  print('|' + '---|' * len(COLUMNS), flush=True)
  for row in rows:
    print(line(run(row)), flush=True)


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
