"""Measures training steps on this machine's GPU, and compares with `plan`.

  python benchmarks/gpu_measured.py --out=DIRECTORY

For each row of `ROWS` (shapes of gpu_plans.py on one GPU), compiles the step of
this package as a run does, times it with a batch that is already on the device,
and models the time of the program that ran (vit_jax/plan/gpu_cost.py). With
`--profile`, compiles the step once more without command buffers, which hide the
kernels from the profiler, times it, and adds up the time of each instruction in
a profile; this takes minutes per row.

Prints a Markdown table, and writes to DIRECTORY: `rows.jsonl` with the figures;
for each row the program (`*.hlo.gz`) and its instructions (`*.csv`) with kind,
FLOPs, bytes, executions per step, modelled and, with `--profile`, measured
microseconds; then also `products.csv`, times of single matrix products and
copies. `--rows` names the rows, and none is started after `--budget_s` seconds.
`--dry_run` lists the rows; `--toy` measures a tiny model on any device. step.py
compares with timm.
"""

import argparse
import collections
import csv
import gzip
import json
import logging
import pathlib
import re
import statistics
import tempfile
import time
from typing import Any

import gpu_plans
import jax
import jax.numpy as jnp
from measured_step import Step

from vit_jax.arrays import devices, memory
from vit_jax.config import loading
from vit_jax.plan import compile, gpu_cost, hlo
from vit_jax.plan.topology import Target
from vit_jax.processes import machine
from vit_jax.training.experiment import Experiment

SWIN = gpu_plans.Row(
  'Swin-T', gpu_plans.H100, 'configs/swin_i1k.py', {'batch_size': 256}
)
TOY = gpu_plans.Row(
  'toy',
  'local',
  'configs/s16_i1k.py',
  {'model.variant': 'Ti/16', 'batch_size': 2, 'image_size': (32, 32)},
)
# In order of importance, because the time on a GPU may end.
NAMES = (
  'B/16, no dropout',
  'S/16',
  'L/16, no dropout',
  'MAE L/16',
  'DINO S/16',
  'H/14, no dropout',
)
ROWS = [
  next(row for row in gpu_plans.ROWS if row.name == name) for name in NAMES
]
ROWS.insert(4, SWIN)
HEAD = (
  'model',
  'batch',
  'measured step, ms',
  'kernels, ms, of a step without command buffers',
  'modelled step, ms',
  'modelled / measured',
  'images/s',
  'MFU %',
)
NO_GRAPHS = {'xla_gpu_enable_command_buffer': ''}
ROUNDS, STEPS, PROFILED = 5, 5, 3
# Rows, contracted and columns of products in the layers of S/16 to H/14, and
# two large ones, which show the rate that the GPU can sustain.
PRODUCTS = (
  *((50_432, k, n) for k, n in ((384, 1536), (768, 768), (768, 3072))),
  *((25_216, k, n) for k, n in ((1024, 1024), (1024, 4096), (4096, 1024))),
  *((32_896, k, n) for k, n in ((1280, 1280), (1280, 5120))),
  (768, 50_432, 3072),
  (1024, 25_216, 4096),
  (8192, 8192, 8192),
  (16_384, 16_384, 16_384),
)
COPIED = (2**20, 2**24, 2**28, 2**31)  # bytes read by a copy


def profile(step: Step, steps: int) -> dict[str, float]:
  """Returns the microseconds per step of each instruction on the device."""
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      step.run(steps)
    [path] = pathlib.Path(directory).rglob('*.xplane.pb')
    data = jax.profiler.ProfileData.from_file(str(path))
    micros: dict[str, float] = collections.defaultdict(float)
    for plane in data.planes:
      if not plane.name.startswith('/device:GPU'):
        continue
      for line in plane.lines:
        if not line.name.startswith('Stream'):
          continue
        for event in line.events:
          stats = dict(event.stats)
          name = stats.get('hlo_op') or f'kernel {event.name[:60]}'
          micros[str(name)] += event.duration_ns / 1e3 / steps
  return dict(micros)


def instructions(
  module: hlo.Module, gpu: devices.Device, measured: dict[str, float]
) -> list[dict[str, Any]]:
  """Returns the instructions of a step with modelled and measured times.

  Instructions that are measured but not modelled have no kind.
  """
  rows: dict[str, dict[str, Any]] = {}
  for op, _, times in hlo.executions(module):
    if op.opcode in gpu_cost.FREE:
      continue
    kernel = gpu_cost.kernel(module, op)
    row = rows.setdefault(
      op.name,
      {
        'name': op.name,
        'kind': kernel.kind,
        'opcode': op.opcode,
        'shape': op.type[:120],
        'flops': kernel.flops,
        'bytes': kernel.bytes,
        'times': 0,
        'modelled_us': 0.0,
      },
    )
    row['times'] += times
    seconds = kernel.seconds(gpu, gpu_cost.EXPECTED)
    row['modelled_us'] += seconds * times * 1e6
  for name, micros in measured.items():
    rows.setdefault(name, {'name': name})['measured_us'] = micros
  return list(rows.values())


def measure(
  row: gpu_plans.Row,
  gpu: devices.Device,
  out: pathlib.Path,
  rounds: int,
  profiled: bool,
) -> dict[str, Any]:
  """Measures one row and returns its figures; see the module."""
  config = compile.changed(loading.load(row.config), **row.overrides)
  experiment = Experiment.build(config, jax.devices()[:1])
  step = Step(experiment, {})
  times = step.times(rounds, STEPS)
  text = step.compiled.as_text() or ''
  target = Target(row.topology, (jax.devices()[0],), gpu)
  total = gpu_cost.of_program(hlo.parse(text), target)
  program = memory.program_bytes(step.compiled) or {}
  seconds = statistics.median(times)
  result = {
    'name': row.name,
    'batch_size': config.batch_size,
    'compile_seconds': round(step.seconds, 1),
    'step_seconds': seconds,
    'step_seconds_of_rounds': times,
    'modelled_seconds': total.predicted_step_seconds,
    'images_per_second': config.batch_size / seconds,
    'mfu': experiment.image_flops
    * config.batch_size
    / seconds
    / gpu.peak_flops,
    'program_peak_bytes': program.get('peak'),
    'computed_by': experiment.model.computed_by(experiment.image_size),
  }
  stats = jax.devices()[0].memory_stats() or {}
  result['peak_bytes_so_far'] = stats.get('peak_bytes_in_use')
  measured: dict[str, float] = {}
  if profiled:
    del step
    step = Step(experiment, NO_GRAPHS)
    times = step.times(rounds, STEPS)
    result['step_seconds_without_command_buffers'] = statistics.median(times)
    measured = profile(step, PROFILED)
    result['kernel_seconds'] = sum(measured.values()) / 1e6
    text = step.compiled.as_text() or ''
  name = re.sub(r'\W+', '_', row.name.lower())
  with gzip.open(out / f'{name}.hlo.gz', 'wt') as file:
    file.write(text)
  rows = instructions(hlo.parse(text), gpu, measured)
  _write(out / f'{name}.csv', rows)
  with open(out / 'rows.jsonl', 'a') as file:
    file.write(json.dumps(result) + '\n')
  return result


def _write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  columns = {key: None for row in rows for key in row}
  with open(path, 'w', newline='') as file:
    writer = csv.DictWriter(file, list(columns))
    writer.writeheader()
    writer.writerows(rows)


def single_kernels(out: pathlib.Path) -> None:
  """Times single products in bfloat16, and copies."""
  rows = []
  for m, k, n in PRODUCTS:
    keys = jax.random.split(jax.random.key(0))
    a, b = (
      jax.random.normal(key, shape, jnp.bfloat16)
      for key, shape in zip(keys, ((m, k), (k, n)), strict=True)
    )
    seconds = _of_kernel(jax.jit(jnp.dot), a, b)
    rate = 2 * m * k * n / seconds / 1e12
    rows.append({'kernel': f'{m}x{k}x{n}', 'us': seconds * 1e6, 'rate': rate})
  for size in COPIED:
    x = jnp.ones(size // 4, jnp.float32)
    seconds = _of_kernel(jax.jit(lambda x: x + 1.0), x)
    rate = 2 * size / seconds / 1e12
    rows.append({'kernel': f'copy {size}', 'us': seconds * 1e6, 'rate': rate})
  _write(out / 'products.csv', rows)


def _of_kernel(work: Any, *arguments: jax.Array, calls: int = 20) -> float:
  """Returns the median seconds of a call, of five rounds of `calls` calls."""
  jax.block_until_ready(work(*arguments))

  def calls_in_a_row() -> None:
    for _ in range(calls):
      result = work(*arguments)
    jax.block_until_ready(result)

  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    calls_in_a_row()
    seconds.append((time.perf_counter() - start) / calls)
  return statistics.median(seconds)


def main() -> None:
  """Measures all rows and prints a table."""
  parser = argparse.ArgumentParser(
    description=(__doc__ or '').partition('\n')[0]
  )
  parser.add_argument('--out', type=pathlib.Path)
  parser.add_argument('--budget_s', type=float, default=600)
  parser.add_argument('--rows', help='names, separated by semicolons')
  for flag in ('--profile', '--dry_run', '--toy'):
    parser.add_argument(flag, action='store_true')
  arguments = parser.parse_args()
  rows = [TOY] if arguments.toy else ROWS
  if arguments.rows:
    known = {row.name: row for row in rows}
    if unknown := set(arguments.rows.split(';')) - set(known):
      parser.error(f'no rows {sorted(unknown)}; there are {list(known)}')
    rows = [known[name] for name in arguments.rows.split(';')]
  if arguments.dry_run:
    for row in rows:
      print(row.name, row.config, row.overrides)
    return
  if arguments.out is None:
    parser.error('--out is missing; give a directory for the figures')
  start = time.perf_counter()
  machine.keep_host_memory()
  arguments.out.mkdir(parents=True, exist_ok=True)
  gpu = devices.of_kind(jax.devices()[0].device_kind) or devices.GPUS['h100']
  print(jax.devices()[0].device_kind, f'jax {jax.__version__}', flush=True)
  if arguments.profile:
    single_kernels(arguments.out)
  print(f'| {" | ".join(HEAD)} |\n|{"---|" * len(HEAD)}', flush=True)
  for row in rows:
    if time.perf_counter() - start > arguments.budget_s:
      print(f'{row.name}: not measured, the time is over', flush=True)
      continue
    try:
      rounds = 1 if arguments.toy else ROUNDS
      result = measure(row, gpu, arguments.out, rounds, arguments.profile)
    except Exception:  # the other rows are still worth measuring
      logging.exception('%s failed', row.name)
      continue
    parts = [
      result.get(key, float('nan')) * 1e3
      for key in ('kernel_seconds', 'step_seconds_without_command_buffers')
    ]
    seconds, modelled = result['step_seconds'], result['modelled_seconds']
    cells = (
      row.name,
      result['batch_size'],
      f'{seconds * 1e3:.2f}',
      f'{parts[0]:.2f} of {parts[1]:.2f}',
      f'{modelled * 1e3:.2f}',
      f'{modelled / seconds:.2f}',
      f'{result["images_per_second"]:,.0f}',
      f'{result["mfu"] * 100:.1f}',
    )
    print(f'| {" | ".join(map(str, cells))} |', flush=True)


if __name__ == '__main__':
  main()
