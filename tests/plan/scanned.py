"""Prints planned sums of layers under a scan with several unroll factors.

test_plan.py starts it as a process, because it needs its own environment.
"""

import json
import sys

from vit_jax.plan import environment

DEPTH, WIDTH, ROWS = 6, 1024, 8192


def program(depth, unroll, device):
  """Returns the optimized HLO of a stack of MLPs without stored outputs."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import SingleDeviceSharding

  def layer(x, kernels):
    first, second = kernels
    return x + jax.nn.gelu(x @ first) @ second, None

  def stack(kernels, x):
    return jax.lax.scan(layer, x, kernels, unroll=unroll)[0]

  def shape(*dims):
    on = SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=on)

  kernels = (
    shape(depth, WIDTH, 4 * WIDTH),
    shape(depth, 4 * WIDTH, WIDTH),
  )
  return jax.jit(stack).lower(kernels, shape(ROWS, WIDTH)).compile().as_text()


def main():
  """Prints a list of [depth, unroll, cycles, FLOPs, loops]."""
  environment.prepare(sys.argv)
  from vit_jax.plan import hlo, topology, tpu_cost

  target = topology.find('v3:2x2')
  result = []
  for depth, unroll in ((DEPTH, 1), (DEPTH, 2), (DEPTH, DEPTH), (2 * DEPTH, 1)):
    module = hlo.parse(program(depth, unroll, target.devices[0]))
    total = tpu_cost.of_program(module, target)
    ops = [op for c in module.computations.values() for op in c.ops.values()]
    loops = sum(op.opcode == 'while' for op in ops)
    sums = total.estimated_cycles, total.matrix_flops
    result.append([depth, unroll, *sums, loops])
  print(json.dumps(result))


if __name__ == '__main__':
  main()
