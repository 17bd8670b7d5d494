"""Costs of one step of a compiled program, on TPUs and on GPUs.

The compiler for TPUs estimates the cycles of its instructions (`tpu_cost`). The
compiler for GPUs does not, so their time is modelled (`gpu_cost`). Both return
a `Cost`.
"""

import dataclasses
import re
from typing import Any

from vit_jax.plan import hlo
from vit_jax.plan.hlo import Op

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


# Sums over the instructions of a step, by their kind and by what is summed.
Sums = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Cost:
  """Sums over one step on one device.

  The names are those of `plan --json`, which prints all but `groups`. None
  means that a value is unknown, or does not exist for these devices.

  Attributes:
    groups: time by (module, direction), see `group`: estimated cycles on TPUs,
      modelled seconds on GPUs.
    predicted_step_seconds: predicted time of a step.
    predicted_step_seconds_range: limits of this time.
    collective_seconds: sums over collectives, by kind: `count` of executions;
      `bytes` of operands or results, see `exchanged_bytes`; modelled `seconds`;
      and `exposed_seconds`, the part that does not overlap with other work
      (always 0 for GPUs, where only the sum of all kinds is known).
    exposed_collective_seconds: seconds of collectives that do not overlap with
      other work.
    estimated_cycles: sum of the TPU compiler's estimates.
    uncounted_cycles: cycles added for instructions without its estimate,
      computed from the rates of the chip.
    kernels: sums over kernels of a GPU, by kind: `count` of executions, `flops`
      of products and attention, `bytes` read and written, modelled `seconds`.
  """

  groups: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
  predicted_step_seconds: float | None = None
  predicted_step_seconds_range: tuple[float, float] | None = None
  collective_seconds: Sums = dataclasses.field(default_factory=dict)
  exposed_collective_seconds: float | None = None
  estimated_cycles: int | None = None
  uncounted_cycles: int | None = None
  kernels: Sums = dataclasses.field(default_factory=dict)


def add(sums: Sums, kind: str, times: int, /, **values: float) -> None:
  """Adds `times` executions of an instruction, given the values of one."""
  totals = sums.setdefault(kind, {})
  for name, value in values.items():
    totals[name] = totals.get(name, 0) + value * times


def kernel(op: Op) -> str:
  """Returns the name of the kernel that a custom call runs, or ''."""
  match = re.search(r'custom_call_target="([^"]*)"', op.attributes)
  return match[1] if op.opcode == 'custom-call' and match else ''


def collective(op: Op) -> str:
  """Returns the kind of a collective; '' for other instructions."""
  kind = re.sub('-(start|done|update)$', '', op.opcode)
  return kind if kind in COLLECTIVES else ''


def exchanged_bytes(op: Op) -> int:
  """Returns the bytes of a collective's operands or result: the larger ones."""
  read = hlo.num_bytes(op.reads)
  written = hlo.num_bytes(op.shapes)
  if op.opcode.endswith('-start') and op.type.startswith('('):
    written = max(written - read, 0)  # the result contains the operands
  return max(read, written)


def group_size(op: Op, devices: int) -> int:
  """Returns the number of devices in each group of a collective.

  If the collective lists no groups, all devices form one; a collective-permute
  has groups of 2, because a device exchanges with one other.

  Args:
    op: collective.
    devices: number of all devices.
  """
  attributes = op.attributes
  # [4,2]<=[8]: four groups of two devices
  if match := re.search(r'replica_groups=\[(\d+),(\d+)\]', attributes):
    return max(int(match[2]), 1)
  # {{0,1},{2,3}}: the devices of each group
  if match := re.search(r'replica_groups=\{\{([\d,]+)\}', attributes):
    return match[1].count(',') + 1
  # mesh['x'=4,'y'=8] {'x','y':(1)2}: the axes that a group extends over; of
  # the axis y, only a part of size 2
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
  if 'rematted_computation' in path:
    direction = 'recomputed'
  elif 'transpose(' in path:
    direction = 'backward'
  elif 'jvp(' in path:
    direction = 'forward'
  else:
    direction = 'update'
  # Parts of the path that are not modules of the model: names that JAX adds,
  # such as jvp(ViT) or nqhc,nkhc->nhqk, and methods, such as ViT.predict. The
  # last part is the operation.
  transformations = re.compile(
    r'.*\(.*\)?|while|body|cond|closed_call|checkpoint|rematted_computation'
    r'|\w+\.\w+|.*->.*|.*[,\[\]].*|branch_\d+_fun'
  )
  *parents, _ = path.split('/')
  modules = [p for p in parents if p and not transformations.fullmatch(p)]
  module = '/'.join(modules)
  if not module:
    traced = path.startswith('jit(')
    module = '(outside the model)' if traced else '(made by the compiler)'
  return module, direction
