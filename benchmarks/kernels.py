"""Compares the scheduled cycles of attention kernels with those of `plan`.

  python benchmarks/kernels.py [v3:2x2 v5e:2x2 ...]

The TPU compiler estimates no cycles for custom kernels, but writes the
instruction bundles that it schedules for one step of their grid. A bundle is
one cycle of a core, without waiting for memory. The second column contains the
cycles that `plan` derives from the cost declared by the kernels;
`Chip.exponentials_per_cycle` is chosen such that both agree at 197 tokens.
Cycles are those of two heads of 64 channels of one example, forward and
backward, on one core.
"""

import glob
import os
import re
import sys
import tempfile

DUMP = tempfile.mkdtemp()
TOPOLOGIES = ('v2:2x2', 'v3:2x2', 'v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2')
TOKENS = (50, 197, 577)
EXAMPLES, WIDTH, HEADS = 64, 1024, 16


def _mesh(topology_name: str):
  """Returns a mesh of one device of a slice, and the chip."""
  from vit_jax.arrays import sharding
  from vit_jax.plan import topology

  target = topology.find(topology_name)
  return sharding.make_mesh(target.devices[:1]), target.chip


def compile_both(mesh, tokens: int) -> None:
  """Compiles the forward and the backward kernel."""
  import jax
  import jax.numpy as jnp

  from vit_jax.arrays import sharding
  from vit_jax.models.attention import tpu

  everywhere = sharding.replicated(mesh)

  def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere)

  def both(projections, biases, dy):
    y, pull = jax.vjp(
      lambda *inputs: tpu.attend(*inputs, HEADS), projections, biases
    )
    return y, pull(dy)

  x = array(EXAMPLES, tokens, WIDTH)
  with jax.set_mesh(mesh):
    jax.jit(both).lower((x,) * 3, (array(WIDTH),) * 3, x).compile()


def scheduled() -> list[int]:
  """Returns the bundles of one grid step of each kernel, from the dump."""
  found = []
  for path in sorted(glob.glob(f'{DUMP}/*final_bundles.txt')):
    with open(path) as file:
      text = file.read()
    match = re.search(r'total scheduled bundles:\s*(\d+)', text)
    if match and 'attention' in os.path.basename(path):
      found.append(int(match[1]))
    os.remove(path)
  return found


def main() -> None:
  """Prints one row for each version and number of tokens."""
  from vit_jax.models.attention import tpu

  print('| topology | tokens | scheduled | counted by plan | ratio |')
  print('|---|---|---|---|---|')
  for name in sys.argv[1:] or TOPOLOGIES:
    mesh, chip = _mesh(name)
    for tokens in TOKENS:
      compile_both(mesh, tokens)
      examples = tpu.examples_at_once(EXAMPLES, tokens)
      bundles = sum(scheduled()) / examples / chip.cores
      head = WIDTH // HEADS
      costs = [
        tpu.cost(backward, (1, tokens, tpu.LANES), 2, head)
        for backward in (False, True)
      ]
      counted = sum(
        chip.kernel_cycles(each.flops, each.transcendentals) for each in costs
      )
      print(
        f'| {name} | {tokens} | {bundles:,.0f} | {counted:,.0f} | '
        f'{counted / bundles:.2f} |',
        flush=True,
      )


if __name__ == '__main__':
  os.environ['LIBTPU_INIT_ARGS'] = (
    f'--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
  )
  from vit_jax.plan import environment

  environment.prepare(sys.argv)
  main()
