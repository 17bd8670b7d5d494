"""Writes configs/predicted.json.

  python benchmarks/plan_configs.py [PATTERN]

`python -m vit_jax.configs` shows these rows next to the published results. Each
row is one config as it is shipped, compiled for one topology (minutes per row;
GPUs need the extra `plan-gpu`).
PATTERN is a regular expression that `CONFIG TOPOLOGY` must contain; --list
shows them. A row that exists for the same config and compiler is kept, except
with --again. --table prints the existing rows in the form of docs/paper.md.
"""

import argparse
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
from typing import Any

from vit_jax.arrays import devices
from vit_jax.plan import environment

VIT = 'configs/vit.py:variant='
ROWS = [
  'configs/l16_i21k.py v3:4x4',
  f'{VIT}B/16,data=i21k v3:4x4',
  f'{VIT}H/14,data=jft v3:4x4',
  'configs/mae.py:model=L v3:4x4',
  'configs/dino.py:recipe=vanilla,variant=S/16 v3:4x4',
  'configs/deit.py:model=S v3:4x4',
  'configs/s16_i1k.py:epochs=90 v3:4x4',
  'configs/mae.py:model=L v5e:8x8',
  'configs/dino.py:recipe=released,variant=S/16 v5e:8x8',
  'configs/dino.py:recipe=released,variant=S/16 v3:4x4',
  'configs/deit.py:model=B v3:4x4',
  'configs/deit3.py:model=B v3:4x4',
  f'{VIT}L/16,data=jft,epochs=14 v3:4x4',
  'configs/mae.py:model=B v3:4x4',
  'configs/resnet.py:variant=R50x1 v3:4x4',
  f'{VIT}B/32,data=i21k v3:4x4',
  'configs/swin_i1k.py:variant=T v3:4x4',
  f'{VIT}L/32,data=i21k v3:4x4',
  'configs/deit.py:model=Ti v3:4x4',
  'configs/masked_patch.py v3:4x4',
  'configs/dinov2.py:recipe=short,model=L v3:4x4',
  'configs/vit5.py:model=B v3:4x4',
  'configs/dinov3.py:recipe=im1k,model=L v3:4x4',
  *(
    f'configs/{name} h100:1x8'
    for name in (
      'augreg.py:model=B/16,data=i21k',
      'deit.py:model=B',
      'deit.py:model=S',
      'deit3.py:model=B',
      'dino.py:recipe=released,variant=S/16',
      'dino.py:recipe=vanilla,variant=S/16',
      'dinov2.py:recipe=short,model=L,gpu=80',
      'dinov2.py:recipe=long,model=L,gpu=80',
      'dinov3.py:recipe=im1k,model=L,gpu=80',
      'dinov3.py:recipe=gram,model=L,gpu=80',
      'dinov3.py:recipe=gram,stage=highres,model=L,gpu=80',
      'l16_i21k.py',
      'mae.py:model=B,gpu=80',
      'mae.py:model=L,gpu=80',
      'masked_patch.py',
      'noisy_student.py',
      'positions.py',
      'resnet.py:variant=R50x1',
      's16_i1k.py:epochs=90',
      'swin_i1k.py:variant=T',
      'vit.py:variant=B/16,data=i21k,gpu=80',
      'vit.py:variant=B/32,data=i21k',
      'vit.py:variant=H/14,data=jft,gpu=80',
      'vit.py:variant=L/16,data=i21k,gpu=80',
      'vit5.py:model=B',
    )
  ),
  'configs/cifar10.py h100:1x1',
  'configs/siglip.py v3:8x8',
  'configs/siglip.py v5e:16x16',
]


def made_by(target: str) -> dict[str, str]:
  """Returns the compiler's versions; rows of other versions are stale."""
  gpus = devices.parse_gpus(target) is not None
  compiler = 'jax-cuda12-plugin' if gpus else 'libtpu'
  version = importlib.metadata.version
  return {'jax': version('jax'), 'compiler': f'{compiler} {version(compiler)}'}


def commit() -> str:
  """Returns the commit that is checked out, with '+' for changed files."""
  told = subprocess.run(
    ['git', 'describe', '--always', '--abbrev=9', '--dirty=+'],
    capture_output=True,
    text=True,
    check=True,
  )
  return told.stdout.strip()


def row(name: str, target: str, resolved: Any) -> dict[str, Any]:
  """Plans a config for a topology."""
  from vit_jax.config import predicted
  from vit_jax.plan import report, topology
  from vit_jax.plan.compile import plan

  made = plan(resolved, topology.find(target))
  if made.text:
    print(f'{name} {target}\n{report.table(report.costliest(made))}')
  return {
    'config': name,
    'topology': target,
    'hash': predicted.fingerprint(resolved),
    'core_days': _rounded(made.predicted_core_days),
    'mfu': _rounded(made.predicted_mfu),
    'images_per_second': _rounded(made.predicted_images_per_second),
    'gib': _rounded(made.peak_bytes_per_device / 2**30),
    'date': datetime.date.today().isoformat(),
    'commit': commit(),
  } | made_by(target)


def table(rows: list[dict[str, Any]]) -> str:
  """Returns the rows as the Markdown table of docs/paper.md."""
  from vit_jax.config import predicted

  head = (
    'config | topology | core-days or GPU-days | MFU, % | images/s | '
    'GiB per device'
  )
  lines = [f'| {head} |', '|' + '---|' * 6]
  for row in rows:
    name = row['config'].removeprefix('configs/')
    cells = (
      f'`{name}`',
      row['topology'],
      predicted.days(row),
      f'{row["mfu"]:.0%}'.rstrip('%'),
      f'{row["images_per_second"]:,.0f}',
      f'{row["gib"]:.1f}',
    )
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def _rounded(value: float | None) -> float | None:
  return value if value is None else float(f'{value:.4g}')


def main() -> None:
  """Plans the requested rows that do not exist."""
  from vit_jax.config import loading, predicted

  parser = argparse.ArgumentParser(
    description=(__doc__ or '').partition('\n')[0]
  )
  parser.add_argument('pattern', nargs='?', default='')
  parser.add_argument('--list', action='store_true')
  parser.add_argument('--again', action='store_true')
  parser.add_argument('--table', action='store_true')
  arguments = parser.parse_args()
  if arguments.table:
    print(table(predicted.read()))
    return
  wanted = [each for each in ROWS if re.search(arguments.pattern, each)]
  if arguments.list:
    print('\n'.join(wanted))
    return
  for name, target in map(str.split, wanted):
    config = loading.load(name)
    key = {'config': name, 'topology': target}
    key |= made_by(target) | {'hash': predicted.fingerprint(config)}
    if not arguments.again and any(
      key.items() <= r.items() for r in predicted.read()
    ):
      continue
    made = row(name, target, config)
    rows = [
      r
      for r in predicted.read()
      if (r['config'], r['topology']) != (name, target)
    ]
    rows = sorted([*rows, made], key=lambda r: (r['config'], r['topology']))
    (loading.directory() / predicted.NAME).write_text(
      json.dumps(rows, indent=1) + '\n'
    )
    print(predicted.line(made), flush=True)


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
