"""Adds up cycles, FLOPs and collectives of one step of a compiled program."""

import collections
import dataclasses
import math
import re

from vit_jax.plan import arithmetic, loops
from vit_jax.plan.hlo import Computation, Module, Op
from vit_jax.plan.topology import Target

COLLECTIVES = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)
# Instructions that cost nothing, or whose cost is counted elsewhere.
FREE = {
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'while',
  'call',
  'conditional',
  'after-all',
  'add-dependency',
  'partition-id',
  'replica-id',
  'opt-barrier',
  'domain',
}
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


@dataclasses.dataclass
class Uncounted:
  """Estimate for instructions of one kind that the compiler does not estimate.

  Attributes:
    times: number of executions in a step.
    bytes: bytes that are read and written in a step.
    flops: FLOPs in a step, as declared by the kernel.
    cycles: cycles in a step, computed from the bandwidth and the throughput of
      the chip.
    overlapped: whether other work runs at the same time (asynchronous copies),
      so that the cycles are shown, but not added to the total.
  """

  times: int = 0
  bytes: int = 0
  flops: int = 0
  cycles: float = 0.0
  overlapped: bool = False


@dataclasses.dataclass
class Collective:
  """Sums over the collectives of one kind in a step.

  Attributes:
    count: number of executions.
    bytes: bytes of operands or results, see `exchanged_bytes`.
    seconds: modelled time.
    exposed_seconds: part of `seconds` that does not overlap with other work;
      always 0 for GPUs, see `gpu_cost.GpuCost`.
  """

  count: int = 0
  bytes: int = 0
  seconds: float = 0.0
  exposed_seconds: float = 0.0

  def add(self, times: int, size: int, seconds: float) -> None:
    """Adds `times` executions of one collective.

    Args:
      times: number of executions.
      size: bytes of one execution.
      seconds: time of one execution.
    """
    self.count += times
    self.bytes += size * times
    self.seconds += seconds * times


@dataclasses.dataclass(frozen=True)
class Cost:
  """Sums over one step on one device.

  Attributes:
    estimated_cycles: sum of the compiler's estimates.
    uncounted: instructions without an estimate of the compiler, by kind.
    collectives: totals by kind.
    matrix_flops: FLOPs of products and convolutions, including recomputed ones.
    groups: estimated cycles by (module, direction), see `group`.
  """

  estimated_cycles: int
  uncounted: dict[str, Uncounted]
  collectives: dict[str, Collective]
  matrix_flops: int
  groups: dict[tuple[str, str], int]

  @property
  def uncounted_cycles(self) -> float:
    """Cycles added for instructions without an estimate."""
    return sum(u.cycles for u in self.uncounted.values() if not u.overlapped)

  @property
  def exposed_seconds(self) -> float:
    """Seconds of collectives that do not overlap with other work."""
    return sum(c.exposed_seconds for c in self.collectives.values())

  def uncertain_seconds(
    self, clock_hz: float
  ) -> dict[str, tuple[float, float]]:
    """Returns by how much the time of a step can differ from the prediction.

    The compiler's own estimates are taken as exact.

    Args:
      clock_hz: clock rate of the cores.

    Returns:
      Smallest and largest difference in seconds, by cause: 'kernels', whose
      cost is declared, and 'exchanges', which at worst nothing hides.
    """
    declared = sum(u.cycles for u in self.uncounted.values() if u.flops)
    fewer, more = (share - 1 for share in _KERNELS)
    seconds = sum(c.seconds for c in self.collectives.values())
    return {
      'kernels': (fewer * declared / clock_hz, more * declared / clock_hz),
      'exchanges': (0.0, seconds / _LINK_FRACTION - self.exposed_seconds),
    }


def of_program(module: Module, target: Target) -> Cost:
  """Adds up the costs of one step of a program.

  Raises:
    UserError: the number of iterations of a loop is unknown.
  """
  cycles, groups = 0, collections.Counter()
  uncounted = collections.defaultdict(Uncounted)
  collectives = collections.defaultdict(Collective)
  for op, computation, times in loops.executions(module):
    kind = op.opcode.removesuffix('-start')
    if op.opcode.endswith(('-done', '-update')):
      continue  # its cost is counted at the '-start' instruction
    if kind in COLLECTIVES:
      _add_collective(collectives[kind], op, computation, times, target)
    if op.estimated_cycles is not None and op.opcode not in FREE:
      cycles += op.estimated_cycles * times
      groups[group(op.path)] += op.estimated_cycles * times
    elif kind not in COLLECTIVES and not _is_free(op):
      _add_uncounted(uncounted, op, computation, times, target)
  flops = sum(
    arithmetic.matrix_flops(op, computation) * times
    for op, computation, times in loops.executions(module, inside_fusions=True)
  )
  flops += sum(kind.flops for kind in uncounted.values())
  return Cost(cycles, dict(uncounted), dict(collectives), flops, dict(groups))


def _is_free(op: Op) -> bool:
  return op.opcode in FREE or kernel(op) in _FREE_KERNELS


def kernel(op: Op) -> str:
  """Returns the name of the kernel that a custom call runs, or ''."""
  match = re.search(r'custom_call_target="([^"]*)"', op.attributes)
  return match[1] if op.opcode == 'custom-call' and match else ''


def _add_uncounted(
  uncounted: dict[str, Uncounted],
  op: Op,
  computation: Computation,
  times: int,
  target: Target,
) -> None:
  """Adds the cost of an instruction that the compiler does not estimate.

  If the instruction is a kernel that declares its bytes and FLOPs, these are
  used. Otherwise the bytes are those of operands and result, without FLOPs.
  """
  name = kernel(op)
  entry = uncounted[f'{op.opcode} {name}'.strip()]
  moved = arithmetic.bytes_moved(op, computation)
  declared = _declared(op) if name else {}
  moved = declared.get('bytes_accessed', moved)
  flops = declared.get('flops', 0)
  cycles = 0.0
  if target.chip is not None:
    chip = target.chip
    cycles = max(
      moved / chip.hbm_bytes_per_s * chip.clock_hz,
      chip.kernel_cycles(flops, declared.get('transcendentals', 0)),
    )
  if op.opcode == 'rng-bit-generator':
    words = arithmetic.num_bytes(op.shapes) / 4
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
  size = exchanged_bytes(op, computation)
  if target.chip is None:
    entry.add(times, size, 0.0)
    return
  members = group_size(op, len(target.devices))
  passes = 2 if op.opcode.startswith('all-reduce') else 1
  wire = passes * size * (members - 1) / members
  seconds = wire / target.chip.link_bytes_per_s
  if target.slices > 1 and members > len(target.devices) // target.slices:
    # After the sum within a slice, each device exchanges its part of the sum
    # with other slices over the slow network.
    members //= target.slices
    seconds += passes * size / members / target.slow_bytes_per_s
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


def exchanged_bytes(op: Op, computation: Computation) -> int:
  """Returns the bytes of a collective's operands or of its result.

  The larger of the two numbers is returned.
  """
  read = arithmetic.num_bytes(tuple(arithmetic.operand_shapes(op, computation)))
  written = arithmetic.num_bytes(op.shapes)
  if op.opcode.endswith('-start') and op.type.startswith('('):
    written = max(written - read, 0)  # the result contains the operands
  return max(read, written)


def group_size(op: Op, devices: int) -> int:
  """Returns the number of devices in each group of a collective.

  Args:
    op: collective.
    devices: number of all devices; the result if `op` does not list groups (2
      for a collective-permute).
  """
  attributes = op.attributes
  if match := re.search(r'replica_groups=\[(\d+),(\d+)\]', attributes):
    return max(int(match[2]), 1)
  if match := re.search(r'replica_groups=\{\{([\d,]+)\}', attributes):
    return match[1].count(',') + 1
  if match := re.search(
    r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', attributes
  ):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    size = 1
    for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2]):
      size *= int(part or sizes.get(axis, 1))
    return size
  return 2 if op.opcode.startswith('collective-permute') else devices


def group(path: str) -> tuple[str, str]:
  """Returns the module and the direction in an instruction's `op_name`.

  The direction is 'forward', 'backward', 'recomputed' (rematerialization) or
  'update' (everything that is not differentiated, such as the optimizer).

  'jit(train_step)/transpose(jvp(ViT))/ViT.predict/encoder/while/body/
  closed_call/layers/mlp/fc1/dot_general' → ('encoder/layers/mlp/fc1',
  'backward').
  """
  parts = [part for part in path.split('/') if part]
  if 'rematted_computation' in path:
    direction = 'recomputed'
  elif 'transpose(' in path:
    direction = 'backward'
  elif 'jvp(' in path:
    direction = 'forward'
  else:
    direction = 'update'
  # Parts of the path that JAX adds, and that are not modules of the model.
  transformations = re.compile(
    r'.*\(.*\)?|while|body|cond|closed_call|checkpoint|rematted_computation'
    r'|\w+\.predict|\w+\.product|.*->.*|.*[,\[\]].*|branch_\d+_fun'
  )
  modules = [part for part in parts[:-1] if not transformations.fullmatch(part)]
  module = '/'.join(modules)
  if not module:
    traced = path.startswith('jit(')
    module = '(outside the model)' if traced else '(made by the compiler)'
  return module, direction
