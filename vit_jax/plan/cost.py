"""Costs of one step of a compiled program, on TPUs and on GPUs.

The compiler for TPUs estimates the cycles of its instructions (`tpu_cost`). The
compiler for GPUs does not, so their time is modelled (`gpu_cost`). Both return
a `Cost`.
"""

import dataclasses
import re

from vit_jax.plan import hlo
from vit_jax.plan.hlo import Computation, Op

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


@dataclasses.dataclass
class Collective:
  """Sums over the collectives of one kind in a step.

  Attributes:
    count: number of executions.
    bytes: bytes of operands or results, see `exchanged_bytes`.
    seconds: modelled time.
    exposed_seconds: part of `seconds` that does not overlap with other work;
      always 0 for GPUs, where only the sum of all kinds is known.
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
class Kernels:
  """Sums over the kernels of one kind in a step on a GPU.

  Attributes:
    count: number of executions.
    flops: FLOPs of products, convolutions and attention.
    bytes: bytes that are read and written.
    seconds: modelled time.
  """

  count: int = 0
  flops: int = 0
  bytes: int = 0
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
  """Sums over one step on one device.

  Attributes:
    matrix_flops: FLOPs of products, convolutions and attention kernels,
      including recomputed ones.
    collectives: totals by kind.
    groups: time by (module, direction), see `group`: estimated cycles on TPUs,
      modelled seconds on GPUs.
    exposed_seconds: seconds of collectives that do not overlap with other work;
      None if the time is unknown.
    seconds: predicted time of a step; None if it is unknown.
    seconds_range: limits of `seconds`.
    uncertain_seconds: smallest and largest difference from `seconds`, by cause;
      None for GPUs.
    estimated_cycles: sum of the compiler's estimates; None for GPUs.
    uncounted: instructions without an estimate of the compiler, by kind; empty
      for GPUs.
    kernels: sums by kind of kernel; empty for TPUs.
  """

  matrix_flops: int
  collectives: dict[str, Collective]
  groups: dict[tuple[str, str], float]
  exposed_seconds: float | None = None
  seconds: float | None = None
  seconds_range: tuple[float, float] | None = None
  uncertain_seconds: dict[str, tuple[float, float]] | None = None
  estimated_cycles: int | None = None
  uncounted: dict[str, Uncounted] = dataclasses.field(default_factory=dict)
  kernels: dict[str, Kernels] = dataclasses.field(default_factory=dict)

  @property
  def uncounted_cycles(self) -> float:
    """Cycles added for instructions without an estimate."""
    return sum(u.cycles for u in self.uncounted.values() if not u.overlapped)


def kernel(op: Op) -> str:
  """Returns the name of the kernel that a custom call runs, or ''."""
  match = re.search(r'custom_call_target="([^"]*)"', op.attributes)
  return match[1] if op.opcode == 'custom-call' and match else ''


def collective(op: Op) -> str:
  """Returns the kind of a collective; '' for other instructions."""
  kind = re.sub('-(start|done|update)$', '', op.opcode)
  return kind if kind in COLLECTIVES else ''


def exchanged_bytes(op: Op, computation: Computation) -> int:
  """Returns the bytes of a collective's operands or of its result.

  The larger of the two numbers is returned.
  """
  read = hlo.num_bytes(tuple(hlo.operand_shapes(op, computation)))
  written = hlo.num_bytes(op.shapes)
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
  # Parts of the path that are not modules of the model: those that JAX adds,
  # and methods of modules, such as ViT.predict.
  transformations = re.compile(
    r'.*\(.*\)?|while|body|cond|closed_call|checkpoint|rematted_computation'
    r'|\w+\.\w+|.*->.*|.*[,\[\]].*|branch_\d+_fun'
  )
  modules = [part for part in parts[:-1] if not transformations.fullmatch(part)]
  module = '/'.join(modules)
  if not module:
    traced = path.startswith('jit(')
    module = '(outside the model)' if traced else '(made by the compiler)'
  return module, direction
