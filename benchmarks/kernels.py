"""Compares the scheduled cycles of attention kernels with those of `plan`.

  python benchmarks/kernels.py [v3:2x2 v5e:2x2 ...]

The TPU compiler estimates no cycles for custom kernels, but writes the
instruction bundles that it schedules for one step of their grid. A bundle is
one cycle of a core, without waiting for memory; those of the loop over tiles of
queries count once for each tile. The second column contains the cycles that
`plan` derives from the cost declared by the kernels;
`Chip.exponentials_per_cycle` is chosen such that both agree at 197 tokens.
Cycles are those of one head of one example, forward and backward, on one core.
"""

import argparse
import glob
import math
import os
import re
import sys
import tempfile

from vit_jax.plan import environment

DUMP = tempfile.mkdtemp()
TOPOLOGIES = ('v2:2x2', 'v3:2x2', 'v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2')
SIZES = (  # tokens, width, heads
  *((tokens, 1024, 16) for tokens in (50, 197, 577, 1025, 2305)),
  *((tokens, 1280, 16) for tokens in (257, 1370)),  # H/14
  *((tokens, 1408, 16) for tokens in (257, 577)),  # g/14
  (49, 512, 16),  # windows of Swin-B
)
WINDOW = 49  # tokens of a window, with offsets of heads and masks
EXAMPLES = 64


def _mesh(topology_name: str):
  """Returns a mesh of one device of a slice, and the device of the table."""
  from vit_jax.arrays import sharding
  from vit_jax.plan import topology

  target = topology.find(topology_name)
  return sharding.make_mesh(target.devices[:1]), target.device


def compile_both(mesh, tokens: int, width: int, heads: int) -> None:
  """Compiles the forward and the backward kernel."""
  import jax
  import jax.numpy as jnp

  from vit_jax.arrays import sharding
  from vit_jax.models.attention import tpu

  everywhere = sharding.replicated(mesh)

  def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere)

  def both(projections, biases, dy, *offsets):
    y, pull = jax.vjp(
      lambda *inputs: tpu.attend(*inputs[:2], heads, *inputs[2:]),
      projections,
      biases,
      *offsets,
    )
    return y, pull(dy)

  x, offsets = array(EXAMPLES, tokens, width), []
  if tokens == WINDOW:
    offsets = [array(n, tokens, tokens) for n in (heads, EXAMPLES)]
  with jax.set_mesh(mesh):
    jax.jit(both).lower((x,) * 3, (array(width),) * 3, x, *offsets).compile()


def scheduled(tiles: int) -> int:
  """Returns the bundles of one grid step of both kernels, from the dump.

  Args:
    tiles: iterations of the loop of a kernel.
  """
  bundles = 0
  for path in glob.glob(f'{DUMP}/*attention*final_bundles.txt'):
    with open(path) as file:
      # The loop of the grid is marked by '>', and a loop inside it by '>>'.
      for depth in re.findall(r'^ *0x\w+ +\w*: *(>*) \{', file.read(), re.M):
        bundles += tiles if len(depth) == 2 else 1
  for path in glob.glob(f'{DUMP}/*'):
    os.remove(path)
  return bundles


def main() -> None:
  """Prints one row for each version and size."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('topologies', nargs='*', default=TOPOLOGIES)
  topologies = parser.parse_args().topologies
  os.environ['LIBTPU_INIT_ARGS'] = (
    f'--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
  )
  environment.prepare(sys.argv)
  import jax.numpy as jnp

  from vit_jax.models.attention import tpu

  print('| chip | channels | tokens | scheduled | derived by plan | ratio |')
  print('|---|---|---|---|---|---|')
  for name in topologies:
    mesh, chip = _mesh(name)
    for tokens, width, num_heads in SIZES:
      compile_both(mesh, tokens, width, num_heads)
      head = width // num_heads
      layout = tpu.layout(tokens, head, jnp.dtype('bfloat16'))
      assert layout is not None
      tile = layout.tile(tokens)
      examples = tpu.examples_at_once(EXAMPLES, tokens, layout.lanes)
      heads = layout.lanes // head * examples * chip.cores
      bundles = scheduled(math.ceil(tokens / tile)) / heads
      costs = [
        tpu.cost(backward, (1, tokens, head), 2, head)
        for backward in (False, True)
      ]
      # As in `plan.tpu_cost`; operands and results are in memory already.
      counted = sum(
        each.flops / chip.peak_flops * chip.clock_hz
        + each.transcendentals / chip.exponentials_per_cycle
        for each in costs
      )
      print(
        f'| {name.partition(":")[0]} | {head} | {tokens} | {bundles:,.0f} | '
        f'{counted:,.0f} | {counted / bundles:.2f} |',
        flush=True,
      )


if __name__ == '__main__':
  main()
