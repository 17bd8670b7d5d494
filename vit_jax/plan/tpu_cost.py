"""Adds up the cycles that the TPU compiler estimates for one step.

Programs for this machine's CPU have no estimates, so their cost has FLOPs and
collectives, but no time.
"""

import collections
import dataclasses
import math
import re

from vit_jax.arrays.devices import Device
from vit_jax.plan import cost, hlo
from vit_jax.plan.cost import Collective, Cost, Uncounted
from vit_jax.plan.hlo import Computation, Module, Op
from vit_jax.plan.topology import Target

# Custom calls that do no work: they allocate a buffer, or join adjacent slices.
_FREE_KERNELS = ('AllocateBuffer', 'ConcatBitcast')
# Assumption for random bit generators, for which the compiler has no estimate:
# ten rounds of Philox, about a hundred integer operations per word, on a vector
# unit of 1024 lanes with about three slots.
_RNG_CYCLES_PER_WORD = 32 / 1024
# Latency of a link between neighbouring chips. Source: ASTRA-sim's validation
# on TPU v3 uses 1 µs, a figure of Google's TPU research team.
_HOP_S = 1e-6
# Assumptions about what widens the range of a step's time. Attention kernels:
# cycles scheduled by the compiler, relative to those of the declared cost
# (benchmarks/kernels.py). Links: the least fraction of the published rate; no
# measurement of TPUs is published, and NCCL reaches 82 % on NVLink.
_KERNELS = (0.8, 1.45)
_LINK_FRACTION = 0.8


def of_program(module: Module, target: Target) -> Cost:
  """Adds up the costs of one step of a program.

  Raises:
    UserError: the number of iterations of a loop is unknown.
  """
  cycles, groups = 0, collections.Counter()
  uncounted = collections.defaultdict(Uncounted)
  collectives = collections.defaultdict(Collective)
  for op, computation, times in hlo.executions(module):
    if op.opcode.endswith(('-done', '-update')):
      continue  # its cost is counted at the '-start' instruction
    kind = cost.collective(op)
    if kind:
      _add_collective(collectives[kind], op, computation, times, target)
    if op.opcode in cost.FREE:
      continue
    if op.estimated_cycles is not None:
      cycles += op.estimated_cycles * times
      groups[cost.group(op.path)] += op.estimated_cycles * times
    elif not kind and cost.kernel(op) not in _FREE_KERNELS:
      _add_uncounted(uncounted, op, computation, times, target.device)
  flops = sum(
    hlo.matrix_flops(op, computation) * times
    for op, computation, times in hlo.executions(module, inside_fusions=True)
  )
  total = Cost(
    matrix_flops=flops + sum(kind.flops for kind in uncounted.values()),
    collectives=dict(collectives),
    groups=dict(groups),
    estimated_cycles=cycles,
    uncounted=dict(uncounted),
  )
  return _with_time(total, target.device) if cycles and target.device else total


def _with_time(total: Cost, device: Device) -> Cost:
  """Adds the predicted time of a step and its range.

  The compiler's own estimates are taken as exact. The range is that of kernels,
  whose cost is declared, and of exchanges, which at worst nothing hides.
  """
  assert total.estimated_cycles is not None
  cycles = total.estimated_cycles + total.uncounted_cycles
  exposed = sum(c.exposed_seconds for c in total.collectives.values())
  exchanges = sum(c.seconds for c in total.collectives.values())
  declared = sum(u.cycles for u in total.uncounted.values() if u.flops)
  low, high = ((x - 1) * declared / device.clock_hz for x in _KERNELS)
  uncertain = {
    'kernels': (low, high),
    'exchanges': (0.0, exchanges / _LINK_FRACTION - exposed),
  }
  seconds = cycles / device.clock_hz + exposed
  return dataclasses.replace(
    total,
    exposed_seconds=exposed,
    seconds=seconds,
    seconds_range=(
      seconds + low,
      seconds + (high + uncertain['exchanges'][1]),
    ),
    uncertain_seconds=uncertain,
  )


def _add_uncounted(
  uncounted: dict[str, Uncounted],
  op: Op,
  computation: Computation,
  times: int,
  device: Device | None,
) -> None:
  """Adds the cost of an instruction that the compiler does not estimate.

  If the instruction is a kernel that declares its bytes and FLOPs, these are
  used. Otherwise the bytes are those of operands and result, without FLOPs.
  """
  name = cost.kernel(op)
  entry = uncounted[f'{op.opcode} {name}'.strip()]
  moved = hlo.bytes_moved(op, computation)
  declared = _declared(op) if name else {}
  moved = declared.get('bytes_accessed', moved)
  flops = declared.get('flops', 0)
  cycles = 0.0
  if device is not None and device.tpu is not None:
    exponentials = declared.get('transcendentals', 0)
    cycles = max(
      moved / device.bytes_per_s * device.clock_hz,
      flops / device.peak_flops * device.clock_hz
      + exponentials / device.tpu.exponentials_per_cycle,
    )
  if op.opcode == 'rng-bit-generator':
    words = hlo.num_bytes(op.shapes) / 4
    cycles = max(cycles, words * _RNG_CYCLES_PER_WORD)
  entry.times += times
  entry.bytes += moved * times
  entry.flops += flops * times
  entry.cycles += cycles * times
  entry.overlapped = op.opcode.endswith('-start')


def _declared(op: Op) -> dict[str, int]:
  """Returns the cost estimate that a kernel declares."""
  found = re.findall(
    r'\\?"(flops|transcendentals|bytes_accessed)\\?":\s*\\?"?(\d+)',
    op.attributes,
  )
  return {name: int(number) for name, number in found}


def _add_collective(
  entry: Collective,
  op: Op,
  computation: Computation,
  times: int,
  target: Target,
) -> None:
  """Adds the cost of a collective, modelled as rings over all links.

  The time is that of the bytes on the links plus the latency of the links
  between the most distant chips of a group.
  """
  size = cost.exchanged_bytes(op, computation)
  if target.device is None:
    entry.add(times, size, 0.0)
    return
  members = cost.group_size(op, len(target.devices))
  passes = 2 if op.opcode.startswith('all-reduce') else 1
  wire = passes * size * (members - 1) / members
  seconds = wire / target.device.link_bytes_per_s
  if target.slices > 1 and members > len(target.devices) // target.slices:
    # After the sum within a slice, each device exchanges its part of the sum
    # with other slices over the slow network.
    members //= target.slices
    seconds += passes * size / members / target.device.network_bytes_per_s
  seconds += passes * _hops(members, target) * _HOP_S
  entry.add(times, size, seconds)
  if not op.opcode.endswith('-start'):
    entry.exposed_seconds += seconds * times


def _hops(members: int, target: Target) -> int:
  """Returns the number of links between the most distant chips of a group.

  The chips of a group are assumed to form a box with equal sides, and the links
  not to wrap around (in a whole pod they do, which halves the distance).

  Args:
    members: number of devices of the group in a slice.
    target: devices of all slices.
  """
  sides = [side for side in target.sides if side > 1]
  chips = members * math.prod(sides) * target.slices / len(target.devices)
  if chips <= 1:
    return 0
  return round(len(sides) * (chips ** (1 / len(sides)) - 1))
