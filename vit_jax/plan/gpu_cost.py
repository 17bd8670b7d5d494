"""Predicts the time of a step from a program that XLA compiled for a GPU.

Without a GPU, XLA cannot time its kernels, and its own estimates are not usable
for library calls. The time is therefore modelled instruction by instruction:

- The time of a matrix product or convolution is its FLOPs divided by a fraction
  of the peak rate, or its bytes divided by a fraction of the memory bandwidth,
  whichever is longer.
- The time of a call of cuDNN's fused attention is computed in the same way,
  with a lower fraction of the peak rate, because its products are small and
  alternate with exponentials.
- The time of every other kernel is its bytes divided by a fraction of the
  bandwidth.
- No kernel is shorter than the time of a launch.
- A collective is a ring over NVLink and, between nodes, over the network. The
  kernels that run between its start and its end hide a part of its time.

The fractions are assumptions with a range (`Rates`), so a plan prints a range
of times in addition to one number.
"""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

from vit_jax.plan import arithmetic, cost, loops
from vit_jax.plan.cost import Collective
from vit_jax.plan.gpus import Cluster, Gpu
from vit_jax.plan.hlo import Computation, Module, Op, Shape

_FREE = cost.FREE | {'async-done', 'async-update'}
_SLICES = ('dynamic-slice', 'slice', 'gather')


class Rates(NamedTuple):
  """Fractions of a GPU's peak rates that kernels reach.

  Attributes:
    product: fraction of the peak FLOP/s in matrix products.
    attention: fraction of the peak FLOP/s in fused attention.
    memory: fraction of the memory bandwidth.
    link: fraction of the rate of NVLink and of the network.
    launch_s: shortest time of a kernel, in seconds.
  """

  product: float
  attention: float
  memory: float
  link: float
  launch_s: float


# Assumptions, to be replaced by measurements. Published measurements:
#
# product: the best shape reaches 80 % of the peak on an H100 and 86 % on an
#   A100 (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS comparison
#   table"). The products of a ViT are smaller than that shape.
# attention: FlashAttention-2 reaches 35 % on an H100 with long sequences
#   (abstract of arXiv 2407.08608). The sequences of a ViT are short and do not
#   fill the tiles.
# memory: 90 % on an A100 for arrays of at least 100 MB (calculon-ai/calculon,
#   systems/a100_80g.json).
# link: NCCL reaches 370 of NVLink's 450 GB/s, 82 % (NVIDIA/nccl-tests, issue
#   212).
# launch_s: a few microseconds, without a source.
EXPECTED = Rates(0.70, 0.30, 0.90, 0.80, 2.0e-6)
OPTIMISTIC = Rates(0.80, 0.45, 0.93, 0.90, 1.0e-6)
PESSIMISTIC = Rates(0.60, 0.15, 0.80, 0.60, 4.0e-6)


class Kernel(NamedTuple):
  """One instruction that runs on the GPU.

  Attributes:
    kind: 'product', 'attention' or 'memory'.
    flops: FLOPs of one execution.
    bytes: bytes that one execution reads and writes.
  """

  kind: str
  flops: int
  bytes: int

  def seconds(self, gpu: Gpu, rates: Rates) -> float:
    """Returns the modelled time of one execution."""
    fraction = rates.attention if self.kind == 'attention' else rates.product
    return max(
      self.flops / (fraction * gpu.peak_flops),
      self.bytes / (rates.memory * gpu.bytes_per_s),
      rates.launch_s,
    )


@dataclasses.dataclass
class Part:
  """Sums over the kernels of one kind in a step.

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
class GpuCost:
  """Sums over one step on one GPU.

  Attributes:
    seconds: modelled time of the kernels, without collectives.
    exposed_seconds: time of collectives that no kernel hides.
    matrix_flops: FLOPs of products, convolutions and fused attention.
    parts: sums by kind of kernel.
    collectives: totals by kind.
    groups: modelled seconds by (module, direction), see `cost.group`.
  """

  seconds: float
  exposed_seconds: float
  matrix_flops: int
  parts: dict[str, Part]
  collectives: dict[str, Collective]
  groups: dict[tuple[str, str], float]

  @property
  def total(self) -> float:
    """Predicted time of a step in seconds."""
    return self.seconds + self.exposed_seconds


def of_program(
  module: Module, cluster: Cluster, rates: Rates = EXPECTED
) -> GpuCost:
  """Adds up the modelled time of a program.

  Args:
    module: optimized program.
    cluster: GPUs that run the program.
    rates: fractions of the peak rates.

  Raises:
    UserError: the number of iterations of a loop is unknown.
  """
  gpu, exposed = cluster.gpu, 0.0
  parts = collections.defaultdict(Part)
  groups: dict[tuple[str, str], float] = collections.defaultdict(float)
  collectives = collections.defaultdict(Collective)
  # Remaining seconds of asynchronous collectives, by computation and name. A
  # kernel between start and end of a collective hides as many seconds of it as
  # the kernel takes; if several collectives are running, only of the first.
  running: dict[str, dict[str, float]] = collections.defaultdict(dict)
  for op, computation, times in loops.executions(module):
    pending = running[computation.name]
    if op.opcode.endswith('-done'):
      exposed += sum(pending.pop(name, 0.0) for name in op.operands) * times
    elif kind := _collective(op):
      seconds, size = _ring(op, computation, cluster, rates)
      collectives[kind].add(times, size, seconds)
      if op.opcode.endswith('-start'):
        pending[op.name] = seconds
      else:
        exposed += seconds * times
    if op.opcode in _FREE or _collective(op):
      continue
    kernel = _kernel(module, op, computation)
    seconds = kernel.seconds(gpu, rates)
    part = parts[kernel.kind]
    part.count += times
    part.flops += kernel.flops * times
    part.bytes += kernel.bytes * times
    part.seconds += seconds * times
    groups[cost.group(op.path)] += seconds * times
    if pending:
      first = next(iter(pending))
      pending[first] = max(0.0, pending[first] - seconds)
  return GpuCost(
    seconds=sum(part.seconds for part in parts.values()),
    exposed_seconds=exposed,
    matrix_flops=sum(part.flops for part in parts.values()),
    parts=dict(parts),
    collectives=dict(collectives),
    groups=dict(groups),
  )


def _kernel(module: Module, op: Op, computation: Computation) -> Kernel:
  """Returns kind, FLOPs and bytes of an instruction."""
  if op.opcode == 'custom-call':
    return _library_call(op, computation)
  if op.opcode != 'fusion':
    flops = arithmetic.matrix_flops(op, computation)
    kind = 'product' if flops else 'memory'
    return Kernel(kind, flops, arithmetic.bytes_moved(op, computation))
  inner = module.computations[op.calls('calls')[0]]
  flops = sum(
    arithmetic.matrix_flops(inner_op, inner) for inner_op in inner.ops.values()
  )
  kind = 'product' if flops else 'memory'
  return Kernel(kind, flops, _fusion_bytes(op, computation, inner))


def _fusion_bytes(op: Op, computation: Computation, inner: Computation) -> int:
  """Returns the bytes that a fusion reads and writes.

  If an operand is only sliced, the slices are counted; if it is updated in
  place, only the update. Both occur in a scan, whose layers are stacked.
  """
  users = collections.defaultdict(list)
  for inner_op in inner.ops.values():
    for operand in inner_op.operands:
      users[operand].append(inner_op)
  root = inner.ops[inner.root]
  results = [root]
  if root.opcode == 'tuple':
    results = [inner.ops[name] for name in root.operands]
  updates = {result.name for result in results if _is_update(result)}
  total = 0
  for name, inner_op in inner.ops.items():
    if inner_op.opcode != 'parameter':
      continue
    readers = users[name]
    is_sliced = [r.opcode in _SLICES and r.operands[0] == name for r in readers]
    if readers and all(is_sliced):
      total += sum(arithmetic.num_bytes(r.shapes) for r in readers)
    elif any(r.name in updates and r.operands[0] == name for r in readers):
      continue  # updated in place
    else:
      total += arithmetic.num_bytes(inner_op.shapes)
  for result in results:
    shapes = result.shapes
    if result.name in updates:
      shapes = inner.ops[result.operands[1]].shapes
    total += arithmetic.num_bytes(shapes)
  return total


def _is_update(op: Op) -> bool:
  return op.opcode == 'dynamic-update-slice'


def _library_call(op: Op, computation: Computation) -> Kernel:
  """Returns kind, FLOPs and bytes of a call of cuBLAS, cuDNN or others."""
  name = cost.kernel(op)
  operands = arithmetic.operand_shapes(op, computation)
  # Results of type s8 or u8 are workspaces of the library.
  results = [s for s in op.shapes if s.dtype not in ('s8', 'u8')]
  moved = arithmetic.num_bytes((*operands, *results))
  if name.startswith('__cublas'):
    return Kernel('product', _product_flops(op, operands, results), moved)
  if name.startswith('__cudnn$conv'):
    flops = _convolution_flops(op, name, operands, results)
    return Kernel('product', flops, moved)
  if name.startswith('__cudnn$fmha'):
    return Kernel('attention', _attention_flops(name, operands), moved)
  return Kernel('memory', 0, moved)


def _product_flops(op: Op, operands: list[Shape], results: list[Shape]) -> int:
  """Returns 2·m·n·k, from the result and the contracted dimensions."""
  match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.attributes)
  axes = [int(axis) for axis in re.findall(r'\d+', match[1])] if match else []
  contracted = math.prod(operands[0].dims[axis] for axis in axes)
  return 2 * math.prod(results[0].dims) * contracted


def _convolution_flops(
  op: Op, name: str, operands: list[Shape], results: list[Shape]
) -> int:
  """Returns the FLOPs of a convolution or of one of its two gradients.

  Each output element takes one multiply-add per element of the filters of its
  channel; products with padding are included.
  """
  kernel, output = operands[1], results[0]
  if name.startswith('__cudnn$convBackwardInput'):
    output = operands[0]
  elif name.startswith('__cudnn$convBackwardFilter'):
    kernel, output = results[0], operands[1]
  labels = re.search(r'dim_labels=\w+_(\w+)->', op.attributes)
  assert labels is not None, op.attributes[:200]
  features = kernel.dims[labels[1].index('o')]
  return 2 * math.prod(output.dims) * math.prod(kernel.dims) // features


def _attention_flops(name: str, operands: list[Shape]) -> int:
  """Returns the FLOPs of fused attention on `[n, tokens, heads, channels]`.

  There are two products in the forward pass, and five in the backward pass,
  which computes the attention weights again.
  """
  query, key = operands[:2]
  product = 2 * math.prod(query.dims) * key.dims[1]
  return (5 if 'Backward' in name else 2) * product


def _collective(op: Op) -> str:
  """Returns the kind of a collective; '' for other instructions."""
  kind = op.opcode
  for ending in ('-start', '-done', '-update'):
    kind = kind.removesuffix(ending)
  return kind if kind in cost.COLLECTIVES else ''


def _ring(
  op: Op, computation: Computation, cluster: Cluster, rates: Rates
) -> tuple[float, int]:
  """Returns the seconds and the bytes of a collective.

  Within a node the ring runs over NVLink. Between nodes, each GPU exchanges its
  part of the node's sum with the other nodes over its own network adapter.
  """
  size = cost.exchanged_bytes(op, computation)
  members = cost.group_size(op, cluster.devices)
  per_node, gpu = min(members, cluster.per_node), cluster.gpu
  passes = 2 if op.opcode.startswith('all-reduce') else 1
  wire = passes * size * (per_node - 1) / per_node
  seconds = wire / (rates.link * gpu.link_bytes_per_s)
  nodes = members // per_node
  if nodes > 1:
    wire = passes * size / per_node * (nodes - 1) / nodes
    seconds += wire / (rates.link * gpu.network_bytes_per_s)
  return max(seconds, rates.launch_s), size
