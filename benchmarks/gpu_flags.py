"""Predicts the effect of XLA's flags on GPU programs.

  python benchmarks/gpu_flags.py

Compiles one training step for absent GPUs (extra `plan-gpu`), once for each
flag and once without, and prints a Markdown table for benchmarks/RESULTS.md
with kernels, collectives and the modelled time of a step. Nothing is run, so a
flag that only acts at run time shows no difference.
"""

import argparse
import sys
from typing import Any

from vit_jax.plan import environment

CONFIG = 'configs/vit.py:variant=B/16,data=i21k,gpu=80'
FLAGS: dict[str, dict[str, Any]] = {
  'none': {},
  'latency-hiding scheduler': {'xla_gpu_enable_latency_hiding_scheduler': True},
  'latency-hiding scheduler off': {
    'xla_gpu_enable_latency_hiding_scheduler': False
  },
  'collectives combined up to 1 MiB': {
    'xla_gpu_all_reduce_combine_threshold_bytes': 2**20,
    'xla_gpu_all_gather_combine_threshold_bytes': 2**20,
    'xla_gpu_reduce_scatter_combine_threshold_bytes': 2**20,
  },
  'collectives combined up to 1 GiB': {
    'xla_gpu_all_reduce_combine_threshold_bytes': 2**30,
    'xla_gpu_all_gather_combine_threshold_bytes': 2**30,
    'xla_gpu_reduce_scatter_combine_threshold_bytes': 2**30,
  },
  'pipelined collectives': {
    'xla_gpu_enable_pipelined_all_gather': True,
    'xla_gpu_enable_pipelined_all_reduce': True,
    'xla_gpu_enable_pipelined_reduce_scatter': True,
  },
  'no command buffers': {'xla_gpu_enable_command_buffer': ''},
  'cuDNN LayerNorm': {'xla_gpu_enable_cudnn_layer_norm': True},
  'cuDNN fusions of products': {'xla_gpu_cudnn_gemm_fusion_level': 3},
  'Triton products': {'xla_gpu_enable_triton_gemm': True},
  'products merged up to 256 MiB': {'xla_gpu_dot_merger_threshold_mb': 256},
}
HEAD = (
  'flag',
  'kernels',
  'GB of other kernels',
  'peak GB',
  'collectives',
  'exposed ms',
  'step ms',
)


def line(name: str, result: dict[str, Any]) -> str:
  """Returns a row of the Markdown table."""
  kernels = result['kernels']
  collectives = ', '.join(
    f'{count} {kind}' for kind, count in result['collectives'].items()
  )
  cells = (
    name,
    str(sum(kind['count'] for kind in kernels.values())),
    f'{kernels["memory"]["bytes"] / 1e9:.1f}',
    f'{result["peak_bytes_per_device"] / 1e9:.1f}',
    collectives,
    f'{result["exposed_collective_seconds"] * 1e3:.2f}',
    f'{result["predicted_step_seconds"] * 1e3:.1f}',
  )
  return f'| {" | ".join(cells)} |'


def main() -> None:
  """Compiles the step with each flag."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--topology', default='h100:1x8')
  parser.add_argument('--config', default=CONFIG)
  parser.add_argument('--batch_size', type=int, default=2048)
  parser.add_argument('--flag', choices=FLAGS, action='append')
  arguments = parser.parse_args()
  if not environment.has_gpu_compiler():
    parser.error(f'no compiler for GPUs: {environment.GPU_EXTRA}')
  import jax

  from vit_jax.config import loading
  from vit_jax.plan import compile, topology

  config = compile.changed(
    loading.load(arguments.config), batch_size=arguments.batch_size
  )
  target = topology.find(arguments.topology)
  print(f'| {" | ".join(HEAD)} |\n|{"---|" * len(HEAD)}', flush=True)
  for name in arguments.flag or FLAGS:
    try:
      result = compile.plan(config, target, FLAGS[name]).to_dict()
    except jax.errors.JaxRuntimeError as error:
      first_line = str(error).splitlines()[0]
      cells = (name, f'does not compile: {first_line[:100]}')
      blank = ' |' * (len(HEAD) - len(cells))
      print(f'| {" | ".join(cells)} |{blank}', flush=True)
    else:
      print(line(name, result), flush=True)


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
