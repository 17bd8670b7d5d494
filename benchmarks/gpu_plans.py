"""Predicts memory, time and MFU of trainings on GPUs.

  python benchmarks/gpu_plans.py [PATTERN ...]

Compiles each row's training step for absent GPUs (extra `plan-gpu`; 10 to 60
seconds per row) and prints a Markdown table for benchmarks/RESULTS.md. All
times are modelled (vit_jax/plan/gpu_cost.py), not measured. PATTERN is a
regular expression that a row's name and topology must contain; if several are
given, they must contain all of them. --list shows the names.

--tree=PATH compiles the step of another working tree of this project with that
tree's code and configs, and models its time with this tree's model:

  git worktree add ../before 9d49ed8
  python benchmarks/gpu_plans.py --tree=../before

--plain also compiles the step of the same ViT in plain Flax (plain_flax.py,
which is written like big_vision's models/vit.py) for the rows without dropout,
and compares memory and time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from vit_jax.plan import environment

# Arguments of configs that other trees do not have are left out for them.
OURS = re.compile(r',gpu=\d+')
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
    ours: changed keys of the config in this tree only.
  """

  name: str
  topology: str
  config: str
  overrides: dict[str, Any] = {}
  ours: dict[str, Any] = {}


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
  Row('DINO S/16', H100, CONFIGS['DINO S/16'], _single(128), REMAT),
  *(
    Row(
      f'{name}, recipe',
      topology,
      config,
      {},
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
# Runs in the other tree: reads a JSON object, writes HLO, prints figures.
STEP_OF_TREE = """
import json, sys
import jax
from jax.experimental import topologies
from vit_jax.arrays import memory
from vit_jax.config import loading
from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment

job = json.loads(sys.argv[1])
described = topologies.get_topology_desc(
  platform='cuda', topology_name='gpu', topology=job['shape'],
  target_config=job['target_config'],
)
config = loading.load(job['config']).copy_and_resolve_references()
config.update_from_flattened_dict(job['overrides'])
experiment = Experiment.build(config, described.devices)
compile_it = jax.stages.Lowered.compile
jax.stages.Lowered.compile = lambda self: compile_it(self, job['options'])
with jax.set_mesh(experiment.mesh):
  compiled = compiling.compile_step(experiment)
with open(job['out'], 'w') as file:
  file.write(compiled.as_text())
print(json.dumps(dict(
  peak=memory.program_bytes(compiled)['peak'],
  image_flops=experiment.image_flops,
  total_steps=experiment.total_steps,
  batch_size=config.batch_size,
  micro_batches=config.micro_batches,
)))
"""


def plan_here(row: Row) -> dict[str, Any]:
  """Returns the plan of a row with this tree's code."""
  from vit_jax.config import loading
  from vit_jax.plan import compile, topology

  changes = row.overrides | row.ours
  config = compile.changed(loading.load(row.config), **changes)
  return compile.plan(config, topology.find(row.topology)).to_dict()


def plan_there(row: Row, tree: str) -> dict[str, Any]:
  """Returns the plan of a row whose step another tree's code defines."""
  from vit_jax.arrays import devices
  from vit_jax.plan import compile, topology

  parsed = devices.parse_gpus(row.topology)
  assert parsed is not None
  kind, nodes, per_node = parsed
  with tempfile.NamedTemporaryFile('r', suffix='.hlo') as file:
    job = {
      'shape': f'1x{nodes}x{per_node}',
      'target_config': topology.target_config(devices.GPUS[kind]),
      'config': OURS.sub('', row.config),
      'overrides': row.overrides,
      'options': compile.GPU_OPTIONS,
      'out': file.name,
    }
    done = subprocess.run(
      [sys.executable, '-c', STEP_OF_TREE, json.dumps(job)],
      cwd=tree,
      env=os.environ | {'PYTHONPATH': '.'},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
    text = file.read()
  return _predicted(row, text, json.loads(done.stdout.splitlines()[-1]))


def plan_plain(row: Row) -> dict[str, Any]:
  """Returns the plan of a row whose step is written in plain Flax."""
  import plain_flax

  from vit_jax.arrays import memory
  from vit_jax.config import loading
  from vit_jax.plan import compile, topology
  from vit_jax.training.experiment import Experiment

  config = compile.changed(loading.load(row.config), **row.overrides)
  target = topology.find(row.topology)
  experiment = Experiment.build(config, [*target.devices])
  compiled = plain_flax.compiled(config, target)
  program = memory.program_bytes(compiled)
  assert program is not None
  made = {
    'peak': program['peak'],
    'image_flops': experiment.image_flops,
    'total_steps': experiment.total_steps,
    'batch_size': config.batch_size,
    'micro_batches': 1,
  }
  return _predicted(row, compiled.as_text() or '', made)


def _predicted(row: Row, text: str, made: dict[str, Any]) -> dict[str, Any]:
  """Returns the plan of a program that is compiled already.

  Args:
    row: row of the table.
    text: optimized HLO.
    made: figures that the program does not contain, as STEP_OF_TREE prints.
  """
  from vit_jax.plan import compile, topology

  target = topology.find(row.topology)
  assert target.device is not None and target.hbm_bytes is not None
  total, number = compile.cost_of(text, target), len(target.devices)
  assert total.predicted_step_seconds is not None
  rate = made['batch_size'] / total.predicted_step_seconds
  peak_flops = target.device.peak_flops * number
  days = (
    total.predicted_step_seconds * made['total_steps'] / compile.SECONDS_PER_DAY
  )
  return {
    'images_per_device': made['batch_size'] / number,
    'micro_batches': made['micro_batches'],
    'peak_bytes_per_device': made['peak'],
    'fits': made['peak'] <= target.hbm_bytes,
    'predicted_step_seconds': total.predicted_step_seconds,
    'predicted_step_seconds_range': total.predicted_step_seconds_range,
    'predicted_mfu': made['image_flops'] * rate / peak_flops,
    'predicted_images_per_second': rate,
    'predicted_core_days': days * number,
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
  parser.add_argument('--tree', help='working tree whose steps are compiled')
  parser.add_argument(
    '--plain', action='store_true', help='compare with plain Flax'
  )
  parser.add_argument('--out', help='append a JSON object per row to this file')
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
      print(row.name, row.topology, row.config, row.overrides | row.ours)
    return
  if not environment.has_gpu_compiler():
    parser.error(f'no compiler for GPUs: {environment.GPU_EXTRA}')
  if arguments.tree and not os.path.isdir(arguments.tree):
    parser.error(f'--tree={arguments.tree} is not a folder')
  head = PLAIN_HEAD if arguments.plain else HEAD
  print(f'| {" | ".join(head)} |\n|{"---|" * len(head)}', flush=True)
  for row in rows:
    if arguments.tree:
      result = plan_there(row, arguments.tree)
    elif arguments.plain:
      result = plan_plain(row)
    else:
      result = plan_here(row)
    if arguments.plain:
      print(compared(row, result, plan_here(row)), flush=True)
    else:
      print(line(row, result), flush=True)
    if arguments.out:
      with open(arguments.out, 'a') as file:
        file.write(json.dumps({'name': row.name} | result) + '\n')


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
