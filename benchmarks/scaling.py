"""Predicts the scaling of a config on TPU v3.

  python benchmarks/scaling.py [--out=FILE]

Compiles the training step of `--config` for slices of 8 to 2,048 cores, once at
the config's global batch and once at its batch per core on 32 cores. It prints
a Markdown table for benchmarks/RESULTS.md with the step time, the fraction of
exposed exchanges, and the efficiency: images per second and core, relative to
the smallest slice that fits. A row takes minutes; nothing is run on a TPU.
"""

import argparse
import sys
from typing import Any

from vit_jax.plan import environment

SLICES = ('2x2', '4x4', '8x8', '16x16', '32x32')  # chips of two cores
PER_CORE_ON = 32
COLUMNS = (
  'images',
  'cores',
  'batch',
  'x',
  'fits',
  'GiB',
  'step ms',
  'exchanges ms',
  'img/s',
  'efficiency %',
  'all-reduces',
)


def predict(config: Any, slice_: str, batch: int) -> dict[str, Any]:
  """Returns the plan's result, with `cores`."""
  from vit_jax.plan import topology
  from vit_jax.plan.compile import changed, plan

  target = topology.find(f'v3:{slice_}')
  cores = len(target.devices)
  # Micro-batches save memory; they are not needed below 64 images per core.
  parts = max(min(config.micro_batches, batch // cores // 64), 1)
  made = plan(changed(config, batch_size=batch, micro_batches=parts), target)
  return made.to_dict() | {'cores': cores}


def lines(rows: list[dict[str, Any]], images: str) -> list[str]:
  """Returns rows of Markdown; efficiency is relative to the first that fits.

  Args:
    rows: results of one series.
    images: the number that is the same in all rows of the series.
  """
  made, first = [], None
  for row in rows:
    cells = [images, row['cores'], row['batch_size'], row['micro_batches']]
    cells += ['yes' if row['fits'] else 'no']
    cells += [f'{row["peak_bytes_per_device"] / 2**30:.2f}']
    if row['predicted_step_seconds']:
      rate = row['predicted_images_per_second']
      first = first or rate / row['cores']
      row['efficiency'] = 100 * rate / row['cores'] / first
      cells += [
        f'{1000 * row["predicted_step_seconds"]:,.1f}',
        f'{1000 * row["exposed_collective_seconds"]:,.1f}',
        f'{rate:,.0f}',
        f'{row["efficiency"]:.1f}',
        row['collectives'].get('all-reduce', 0),
      ]
    cells += [''] * (len(COLUMNS) - len(cells))
    made.append('| ' + ' | '.join(map(str, cells)) + ' |')
  return made


def draw(series: dict[str, list[dict[str, Any]]], path: str) -> None:
  """Draws images per second over cores, with logarithmic axes."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(figsize=(6, 4))
  for name, rows in series.items():
    told = [row for row in rows if row['predicted_step_seconds']]
    cores = [row['cores'] for row in told]
    rates = [row['predicted_images_per_second'] for row in told]
    axes.loglog(cores, rates, marker='o', label=f'images: {name}')
    ideal = [rates[0] / cores[0] * n for n in cores]
    axes.loglog(cores, ideal, color='grey', linestyle=':')
  axes.set_xlabel('TPU v3 cores')
  axes.set_ylabel('images a second, predicted')
  axes.set_xticks(cores, [str(n) for n in cores])
  axes.minorticks_off()
  axes.legend()
  figure.tight_layout()
  figure.savefig(path, dpi=120)


def main() -> None:
  from vit_jax.config import loading
  from vit_jax.plan import topology

  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--config', default='configs/l16_i21k.py')
  parser.add_argument('--out', help='draw a picture to this .png')
  arguments = parser.parse_args()
  config = loading.load(arguments.config)
  whole, series = config.batch_size, {}
  print(f'| {" | ".join(COLUMNS)} |\n|{"---|" * len(COLUMNS)}', flush=True)
  for name, batch_of in {
    f'{whole} in total': lambda cores: whole,
    f'{whole // PER_CORE_ON} per core': lambda cores: (
      whole // PER_CORE_ON * cores
    ),
  }.items():
    rows = []
    for slice_ in SLICES:
      cores = len(topology.find(f'v3:{slice_}').devices)
      rows.append(predict(config, slice_, batch_of(cores)))
      print(f'v3:{slice_} done', file=sys.stderr, flush=True)
    series[name] = rows
    print('\n'.join(lines(rows, name)), flush=True)
  if arguments.out:
    draw(series, arguments.out)


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
