"""Adds up the cycles that the TPU compiler estimates for one step.

Programs for this machine's CPU have no estimates: their cost has collectives,
but no time.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.arrays.devices import Device
from vit_jax.plan import cost, hlo
from vit_jax.plan.cost import Cost, Sums
from vit_jax.plan.hlo import Module, Op
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
# Assumptions that determine the range of a step's time.
# Attention kernels: least and largest ratio of the cycles that the compiler
# schedules to those of the declared cost (benchmarks/kernels.py).
_KERNEL_RANGE = (0.8, 1.45)
# Links: least fraction of the published rate. No measurement of TPUs is
# published; NCCL reaches 82 % on NVLink.
_LINK_FRACTION = 0.8


def of_program(module: Module, target: Target) -> Cost:
  """Adds up the costs of one step of a program.

  Raises:
    UserError: the number of iterations of a loop is unknown.
  """
  cycles, groups, collectives = 0, collections.Counter(), {}
  # Cycles of instructions without an estimate: of kernels that declare their
  # cost, and of others.
  declared_cycles = other_cycles = 0.0
  for op, _, times in hlo.executions(module):
    if op.opcode.endswith(('-done', '-update')):
      continue  # its cost is counted at the '-start' instruction
    kind = cost.collective(op)
    if kind:
      size, seconds = _ring(op, target)
      # Asynchronous collectives are assumed to be hidden by other work.
      exposed = 0.0 if op.opcode.endswith('-start') else seconds
      once = dict(count=1, bytes=size, seconds=seconds, exposed_seconds=exposed)
      cost.add(collectives, kind, times, **once)
    if op.opcode in cost.FREE:
      continue
    if op.estimated_cycles is not None:
      cycles += op.estimated_cycles * times
      groups[cost.group(op.path)] += op.estimated_cycles * times
    elif not (
      kind
      or cost.kernel(op) in _FREE_KERNELS
      or op.opcode.endswith('-start')  # copies, which other work overlaps
    ):
      declared = _declared(op) if cost.kernel(op) else {}
      added = _without_estimate(op, declared, target.device) * times
      if declared.get('flops'):
        declared_cycles += added
      else:
        other_cycles += added
  uncounted_cycles = declared_cycles + other_cycles
  total = Cost(
    groups=dict(groups),
    collective_seconds=collectives,
    estimated_cycles=cycles or None,
    uncounted_cycles=round(uncounted_cycles),
  )
  if not cycles or target.device is None:
    return total
  clock_hz = target.device.clock_hz
  step_times = _times(
    cycles + uncounted_cycles, declared_cycles, clock_hz, collectives
  )
  return dataclasses.replace(total, **step_times)


def _times(
  cycles: float, uncertain: float, clock_hz: float, collectives: Sums
) -> dict[str, Any]:
  """Returns the time of a step and its range, by their names in `Cost`.

  The compiler's own estimates are taken as exact. The range is that of kernels,
  whose cost is declared, and of exchanges, which at worst nothing hides.

  Args:
    cycles: cycles of all instructions but the collectives.
    uncertain: cycles of kernels that declare their cost.
    clock_hz: clock rate.
    collectives: sums over collectives, by kind.
  """
  exposed = sum(sums['exposed_seconds'] for sums in collectives.values())
  exchanges = sum(sums['seconds'] for sums in collectives.values())
  low, high = ((ratio - 1) * uncertain / clock_hz for ratio in _KERNEL_RANGE)
  unhidden = exchanges / _LINK_FRACTION - exposed
  seconds = cycles / clock_hz + exposed
  return dict(
    predicted_step_seconds=seconds,
    predicted_step_seconds_range=(seconds + low, seconds + (high + unhidden)),
    exposed_collective_seconds=exposed,
  )


def _without_estimate(
  op: Op, declared: Mapping[str, int], device: Device | None
) -> float:
  """Returns the cycles of an instruction without an estimate.

  Args:
    op: instruction.
    declared: cost that a kernel declares. Without it, the bytes are those of
      operands and result, without FLOPs.
    device: rates of the device; the result is 0 if they are unknown.
  """
  moved = declared.get('bytes_accessed', hlo.bytes_moved(op))
  flops = declared.get('flops', 0)
  cycles = 0.0
  if device is not None and device.exponentials_per_cycle:
    exponentials = declared.get('transcendentals', 0)
    cycles = max(
      moved / device.bytes_per_s * device.clock_hz,
      flops / device.peak_flops * device.clock_hz
      + exponentials / device.exponentials_per_cycle,
    )
  if op.opcode == 'rng-bit-generator':
    words = hlo.num_bytes(op.shapes) / 4
    cycles = max(cycles, words * _RNG_CYCLES_PER_WORD)
  return cycles


def _declared(op: Op) -> dict[str, int]:
  """Returns the cost estimate that a kernel declares."""
  found = re.findall(
    r'\\?"(flops|transcendentals|bytes_accessed)\\?":\s*\\?"?(\d+)',
    op.attributes,
  )
  return {name: int(number) for name, number in found}


def _ring(op: Op, target: Target) -> tuple[int, float]:
  """Returns the bytes and the seconds of a collective: rings over all links.

  The time is that of the bytes on the links plus the latency of the links
  between the most distant chips of a group; it is 0 if the rates are unknown.
  """
  size = cost.exchanged_bytes(op)
  if target.device is None:
    return size, 0.0
  members = cost.group_size(op, len(target.devices))
  passes = 2 if op.opcode.startswith('all-reduce') else 1
  wire = passes * size * (members - 1) / members
  seconds = wire / target.device.link_bytes_per_s
  if target.slices > 1 and members > len(target.devices) // target.slices:
    # After the sum within a slice, each device exchanges its part of the sum
    # with other slices over the slow network.
    members //= target.slices
    seconds += passes * size / members / target.device.network_bytes_per_s
  return size, seconds + passes * _hops(members, target) * _HOP_S


def _hops(members: int, target: Target) -> int:
  """Returns the number of links between the most distant chips of a group.

  The chips of a group are assumed to form a box with equal sides, and the links
  not to wrap around (in a whole pod they do, which halves the distance).

  Args:
    members: number of devices of the group in a slice.
    target: devices of all slices.
  """
  sides = [side for side in target.sides if side > 1]
  chips_per_device = math.prod(sides) * target.slices / len(target.devices)
  chips = members * chips_per_device
  if chips <= 1:
    return 0
  side = chips ** (1 / len(sides))  # of the box, in chips
  return round(len(sides) * (side - 1))
