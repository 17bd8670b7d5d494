"""Predicts the time of a step from a program that XLA compiled for a GPU.

Without a GPU, XLA cannot time its kernels, and its own estimates are not usable
for library calls. The time is therefore modelled instruction by instruction:

- The time of a kernel is a fixed time, plus its FLOPs divided by a fraction of
  the peak rate or its bytes divided by a fraction of the memory bandwidth,
  whichever is longer.
- The fractions and the fixed times depend on the kind of kernel: products and
  convolutions, cuDNN's fused attention, reductions, and all others.
- A product is computed in tiles, one for each multiprocessor at a time. If the
  last wave of tiles is not full, the others wait (NVIDIA's guide "Matrix
  Multiplication Background" calls it wave quantization).
- A collective is a ring over NVLink and, between nodes, over the network. The
  kernels that run between its start and its end hide a part of its time.

Most numbers are fitted to one step on an H200 (`Rates`), the fractions of the
peak FLOP/s to each family of GPUs where a measurement is known
(`arrays/devices.py`). A plan also prints a range of times.
benchmarks/published.py compares the model with published measurements.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.arrays.devices import Device
from vit_jax.plan import cost, hlo
from vit_jax.plan.cost import Cost
from vit_jax.plan.hlo import Computation, Module, Op, Shape
from vit_jax.plan.topology import Target

FREE = cost.FREE | {'async-done', 'async-update'}
_SLICES = ('dynamic-slice', 'slice', 'gather')


class Rates(NamedTuple):
  """Fractions of a GPU's peak rates that kernels reach, and their fixed times.

  Attributes:
    product: FLOP/s in matrix products, relative to `Device.product`.
    attention: FLOP/s in fused attention, relative to `Device.attention`.
    reduction: fraction of the memory bandwidth in reductions.
    memory: fraction of the memory bandwidth in other kernels.
    copy: fraction of the memory bandwidth that products and attention cannot
      exceed.
    link: fraction of the rate of NVLink and of the network.
    product_s: fixed time of a product, in seconds; products of few contracted
      elements are slower mainly because of it.
    launch_s: fixed time of every other kernel, and shortest time of a
      collective, in seconds.
  """

  product: float
  attention: float
  reduction: float
  memory: float
  copy: float
  link: float
  product_s: float
  launch_s: float


# The expected values are fitted to the profile of each kernel of a step of B/16
# on an H200 (benchmarks/measured/h200/b_16_no_dropout.csv): the fixed times by
# regression, then the fractions so that the times of each kind add up to the
# measured ones. The same numbers predict the kernels of S/16 (s_16.csv), which
# were not used, within 7 % for each kind and 3 % in total. Others:
#
# copy: a copy of 2 GiB on the H200 reaches 4.2 of 4.8 TB/s (products.csv).
# link: NCCL reaches 370 of NVLink's 450 GB/s, 82 % (NVIDIA/nccl-tests, issue
#   212).
#
# The other values limit the range. memory: 90 % on an A100 for arrays of at
# least 100 MB (calculon-ai/calculon, systems/a100_80g.json). All others, and
# all pessimistic ones, are assumptions without a source.
_RATES = {  # optimistic, expected, pessimistic
  'product': (1.1, 1.0, 0.85),
  'attention': (1.5, 1.0, 0.75),
  'reduction': (0.75, 0.615, 0.50),
  'memory': (0.90, 0.73, 0.60),
  'copy': (0.93, 0.87, 0.75),
  'link': (0.90, 0.80, 0.60),
  'product_s': (4e-6, 8e-6, 12e-6),
  'launch_s': (1e-6, 1.5e-6, 4e-6),
}
OPTIMISTIC, EXPECTED, PESSIMISTIC = (
  Rates(**{name: values[column] for name, values in _RATES.items()})
  for column in range(3)
)
# With t keys, fused attention reaches t / (t + 400) of its rate for long
# sequences: short ones do not fill the tiles. Fitted to published inference
# of B/16 and B/8 on an RTX 4090, 197 and 785 tokens (benchmarks/published.py).
_HALF_TOKENS = 400
# Rows and columns of the tile of a product that one multiprocessor computes.
# Libraries choose among several; this is their usual one for large products.
_TILE = 128
_SPLIT = 1024  # contracted elements of a tile


class Kernel(NamedTuple):
  """One instruction that runs on the GPU.

  Attributes:
    kind: 'product', 'attention', 'reduction' or 'memory'.
    flops: FLOPs of one execution.
    bytes: bytes that one execution reads and writes.
    tokens: number of keys of a sequence, for attention; otherwise 0.
    tiles: tiles of the result of a product; 0 if unknown.
    dtype: type of the operands of a product.
  """

  kind: str
  flops: int
  bytes: int
  tokens: int = 0
  tiles: int = 0
  dtype: str = 'bf16'

  def seconds(self, gpu: Device, rates: Rates) -> float:
    """Returns the modelled time of one execution."""
    compute = rates.product * gpu.product  # fractions of the peak FLOP/s
    if self.kind == 'attention':
      filled = self.tokens / (self.tokens + _HALF_TOKENS)
      compute = rates.attention * gpu.attention * filled
    if self.dtype == 'f32':
      compute *= gpu.float32
    if self.tiles:
      waves = self.tiles / gpu.processors
      compute *= waves / math.ceil(waves)
    memory = {'reduction': rates.reduction, 'memory': rates.memory}
    bandwidth = memory.get(self.kind, rates.copy) * gpu.bytes_per_s
    fixed = rates.product_s if self.kind == 'product' else rates.launch_s
    return fixed + max(
      self.flops / (compute * gpu.peak_flops),
      self.bytes / bandwidth,
    )


def of_program(module: Module, target: Target) -> Cost:
  """Adds up the modelled time of a program, with its range.

  Args:
    module: optimized program.
    target: GPUs that run the program.

  Raises:
    UserError: the number of iterations of a loop is unknown.
  """
  low, expected, high = (
    at_rates(module, target, rates)
    for rates in (OPTIMISTIC, EXPECTED, PESSIMISTIC)
  )
  limits = low.predicted_step_seconds, high.predicted_step_seconds
  return dataclasses.replace(expected, predicted_step_seconds_range=limits)


def at_rates(module: Module, target: Target, rates: Rates) -> Cost:
  """Adds up the modelled time of a program at given fractions of the rates."""
  assert target.device is not None
  exposed = 0.0
  kernels, collectives = {}, {}
  groups: dict[tuple[str, str], float] = collections.defaultdict(float)
  # Remaining seconds of asynchronous collectives, by computation and name. A
  # kernel between start and end of a collective hides as many seconds of it as
  # the kernel takes; if several collectives are running, only of the first.
  running: dict[str, dict[str, float]] = collections.defaultdict(dict)
  for op, computation, times in hlo.executions(module):
    pending = running[computation.name]
    kind = cost.collective(op)
    if op.opcode.endswith('-done'):
      exposed += sum(pending.pop(name, 0.0) for name in op.operands) * times
    elif kind:
      size, seconds = _ring(op, target, rates)
      sums = dict(count=1, bytes=size, seconds=seconds, exposed_seconds=0.0)
      cost.add(collectives, kind, times, **sums)
      if op.opcode.endswith('-start'):
        pending[op.name] = seconds
      else:
        exposed += seconds * times
    if kind or op.opcode in FREE:
      continue
    work = kernel(module, op)
    seconds = work.seconds(target.device, rates)
    sums = dict(count=1, flops=work.flops, bytes=work.bytes, seconds=seconds)
    cost.add(kernels, work.kind, times, **sums)
    groups[cost.group(op.path)] += seconds * times
    if pending:
      first = next(iter(pending))
      pending[first] = max(0.0, pending[first] - seconds)
  return Cost(
    groups=dict(groups),
    predicted_step_seconds=sum(sums['seconds'] for sums in kernels.values())
    + exposed,
    collective_seconds=collectives,
    exposed_collective_seconds=exposed,
    kernels=kernels,
  )


def kernel(module: Module, op: Op) -> Kernel:
  """Returns kind, FLOPs and bytes of an instruction."""
  if op.opcode == 'custom-call':
    return _library_call(op)
  # XLA's kernels of the kind "input" are reductions.
  kind = 'memory'
  if op.opcode == 'reduce' or 'kind=kInput' in op.attributes:
    kind = 'reduction'
  ops, moved = [op], hlo.bytes_moved(op)
  if op.opcode == 'fusion':
    inner = module.computations[op.calls('calls')[0]]
    ops, moved = list(inner.ops.values()), _fusion_bytes(inner)
  flops = {each.name: _product_flops(each) for each in ops}
  total = sum(flops.values())
  if not total:
    return Kernel(kind, 0, moved)
  largest = max(ops, key=lambda each: flops[each.name])
  tiles = _tiles(largest, largest.shapes[0]) if largest.opcode == 'dot' else 0
  dtype = largest.reads[0].dtype
  return Kernel('product', total, moved, tiles=tiles, dtype=dtype)


def _product_flops(op: Op) -> int:
  """Returns the FLOPs of a matrix product or convolution, else 0."""
  if op.opcode == 'dot':
    return 2 * math.prod(op.shapes[0].dims) * hlo.dimensions(op, 'contracting')
  # By default, XLA replaces all convolutions by calls of cuDNN. With its option
  # xla_gpu_experimental_enable_conv_fusion, they are part of fusions.
  if op.opcode == 'convolution':
    return _convolution_flops(op, op.shapes)
  return 0


def _fusion_bytes(inner: Computation) -> int:
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
  updates = {r.name for r in results if r.opcode == 'dynamic-update-slice'}
  total = 0
  for name, inner_op in inner.ops.items():
    if inner_op.opcode != 'parameter':
      continue
    readers = users[name]
    is_sliced = [r.opcode in _SLICES and r.operands[0] == name for r in readers]
    if readers and all(is_sliced):
      total += sum(hlo.num_bytes(r.shapes) for r in readers)
    elif any(r.name in updates and r.operands[0] == name for r in readers):
      continue  # updated in place
    else:
      total += hlo.num_bytes(inner_op.shapes)
  for result in results:
    shapes = result.shapes
    if result.name in updates:
      shapes = inner.ops[result.operands[1]].shapes
    total += hlo.num_bytes(shapes)
  return total


def _library_call(op: Op) -> Kernel:
  """Returns kind, FLOPs and bytes of a call of cuBLAS, cuDNN or others."""
  name = cost.kernel(op)
  # Results of type s8 or u8 are workspaces of the library.
  results = [s for s in op.shapes if s.dtype not in ('s8', 'u8')]
  moved = hlo.num_bytes((*op.reads, *results))
  if name.startswith('__cublas'):
    # 2·m·n·k, from the result and the contracted dimensions.
    contracted = hlo.dimensions(op, 'contracting')
    flops = 2 * math.prod(results[0].dims) * contracted
    tiles, dtype = _tiles(op, results[0]), op.reads[0].dtype
    return Kernel('product', flops, moved, tiles=tiles, dtype=dtype)
  if name.startswith('__cudnn$conv'):
    flops = _convolution_flops(op, results)
    return Kernel('product', flops, moved, dtype=op.reads[0].dtype)
  if name.startswith('__cudnn$fmha'):
    return Kernel('attention', _attention_flops(op), moved, op.reads[1].dims[1])
  return Kernel('memory', 0, moved)


def _tiles(op: Op, result: Shape) -> int:
  """Returns the number of tiles of the products of a batch of matrices.

  A long contraction, as in the gradient of a matrix, is split among several
  multiprocessors (split-K).
  """
  batch = hlo.dimensions(op, 'batch')
  contracted = hlo.dimensions(op, 'contracting')
  columns = math.prod(op.reads[1].dims) // (contracted * batch)
  rows = math.prod(result.dims) // (columns * batch)
  splits = math.ceil(contracted / _SPLIT)
  return batch * splits * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)


def _convolution_flops(op: Op, results: Sequence[Shape]) -> int:
  """Returns the FLOPs of a convolution or of one of its two gradients.

  Each output element takes one multiply-add per element of the filters of its
  channel; products with padding are included, those with the zeros of a
  dilated input are not.
  """
  name, kernel, output = cost.kernel(op), op.reads[1], results[0]
  if name.startswith('__cudnn$convBackwardInput'):
    output = op.reads[0]
  elif name.startswith('__cudnn$convBackwardFilter'):
    kernel, output = results[0], op.reads[1]
  # b01f_01io->b01f: axes of input, filters and output; 'o' is the axis of the
  # filters with the output channels.
  labels = re.search(r'dim_labels=\w+_(\w+)->', op.attributes)
  assert labels is not None, op.attributes[:200]
  channels = kernel.dims[labels[1].index('o')]
  total = 2 * math.prod(output.dims) * math.prod(kernel.dims) // channels
  dilation = re.search(r'lhs_dilate=([\dx]+)', op.attributes)
  factors = map(int, dilation[1].split('x')) if dilation else ()
  return total // math.prod(factors)


def _attention_flops(op: Op) -> int:
  """Returns the FLOPs of fused attention on `[n, tokens, heads, channels]`.

  There are two products in the forward pass, and five in the backward pass,
  which computes the attention weights again.
  """
  query, key = op.reads[:2]
  product = 2 * math.prod(query.dims) * key.dims[1]
  return (5 if 'Backward' in cost.kernel(op) else 2) * product


def _ring(op: Op, target: Target, rates: Rates) -> tuple[int, float]:
  """Returns the bytes and the seconds of a collective.

  Within a node the ring runs over NVLink. Between nodes, each GPU exchanges its
  part of the node's sum with the other nodes over its own network adapter.
  """
  size = cost.exchanged_bytes(op)
  members = cost.group_size(op, len(target.devices))
  assert target.device is not None
  gpu = target.device
  per_node = min(members, len(target.devices) // target.slices)
  passes = 2 if op.opcode.startswith('all-reduce') else 1
  wire = passes * size * (per_node - 1) / per_node
  seconds = wire / (rates.link * gpu.link_bytes_per_s)
  nodes = members // per_node
  if nodes > 1:
    # The ring's result is spread over the GPUs of a node.
    wire = passes * size / per_node * (nodes - 1) / nodes
    seconds += wire / (rates.link * gpu.network_bytes_per_s)
  return size, max(seconds, rates.launch_s)
