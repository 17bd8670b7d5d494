"""Measures the time to trace and to compile a training step for a TPU slice.

  python benchmarks/compile_time.py [--rounds=2]

The step is that of L/16 at batch size 4096 on v3:4x4 without dropout. It
compares the config's own step, the same step with scanned layers
(`model.unroll=1`), and a plain Flax ViT with `nn.scan` and Flax's attention
under full rematerialization. The table contains medians over several rounds,
and ratios to the plain ViT. Run it on an idle machine.
"""

import argparse
import functools
import statistics
import sys
import time
from typing import Any

from vit_jax.plan import environment

CONFIG, TOPOLOGY = 'configs/l16_i21k.py', 'v3:4x4'


def ours(target: Any, **changes: Any) -> None:
  """Compiles the config's step, as by `plan` and the loop."""
  import jax

  from vit_jax.config import loading
  from vit_jax.plan.compile import changed
  from vit_jax.training import compiling
  from vit_jax.training.experiment import Experiment

  config = changed(loading.load(CONFIG), model__dropout=0.0, **changes)
  experiment = Experiment.build(config, target.devices)
  with jax.set_mesh(experiment.mesh):
    compiling.compile_step(experiment)


def plain(target: Any) -> None:
  """Compiles the step of a scanned Flax ViT with Optax's AdamW."""
  import plain_flax

  from vit_jax.config import loading

  plain_flax.compiled(loading.load(CONFIG), target, scanned=True)


def main() -> None:
  """Runs every variant in turn."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=2)
  rounds = parser.parse_args().rounds
  import jax

  from vit_jax.plan import topology

  target = topology.find(TOPOLOGY)
  ways = {
    'plain Flax, scanned, `full` remat': plain,
    'vit_jax, scanned': functools.partial(ours, model__unroll=1),
    'vit_jax, as shipped (unrolled)': ours,
  }
  seconds: dict[str, list[float]] = {name: [] for name in ways}
  for _ in range(rounds):
    for name, way in ways.items():
      jax.clear_caches()
      started = time.monotonic()
      way(target)
      seconds[name].append(time.monotonic() - started)
  print('| step | seconds | ratio |\n|---|---|---|')
  medians = {name: statistics.median(each) for name, each in seconds.items()}
  first = next(iter(medians.values()))
  for name, median in medians.items():
    print(f'| {name} | {median:.1f} | {median / first:.2f} |', flush=True)


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
