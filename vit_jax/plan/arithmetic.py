"""Counts the FLOPs and bytes of single HLO instructions."""

import math
import re

import numpy as np

from vit_jax.plan.hlo import Computation, Op, Shape

_WIDTH = {'pred': 1, 'token': 0, 'opaque': 0, 'tuple': 0}


def num_bytes(shapes: tuple[Shape, ...]) -> int:
  """Returns the size of arrays in bytes, without the padding of layouts."""
  return sum(_element_bits(s.dtype) * math.prod(s.dims) // 8 for s in shapes)


def _element_bits(dtype: str) -> int:
  if dtype in _WIDTH:
    return 8 * _WIDTH[dtype]
  digits = re.search(r'\d+', dtype)  # f32, bf16, s4, f8e4m3fn, c64
  return int(digits[0]) if digits else 0


def operand_shapes(op: Op, computation: Computation) -> list[Shape]:
  """Returns the shapes of the arrays that an instruction reads."""
  ops = computation.ops
  return [s for name in op.operands if name in ops for s in ops[name].shapes]


def bytes_moved(op: Op, computation: Computation) -> int:
  """Returns the bytes that an instruction reads and writes.

  If an array is sliced or updated in place, only the slice or the update is
  counted. If the compiler keeps an operand on the chip, the result is an upper
  bound.
  """
  read = operand_shapes(op, computation)
  if op.opcode == 'dynamic-update-slice':
    return 2 * num_bytes(tuple(read[1:2]))
  if op.opcode in ('slice', 'dynamic-slice'):
    return 2 * num_bytes(op.shapes)
  return num_bytes(tuple(read)) + num_bytes(op.shapes)


def matrix_flops(op: Op, computation: Computation) -> int:
  """Returns the FLOPs of a matrix product or convolution, else 0."""
  if op.opcode == 'dot':
    return _dot(op, computation)
  if op.opcode == 'convolution':
    return _convolution(op, computation)
  return 0


def _dot(op: Op, computation: Computation) -> int:
  left = operand_shapes(op, computation)[0]
  match = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', op.attributes)
  axes = [int(axis) for axis in match[1].split(',') if axis] if match else []
  contracted = math.prod(left.dims[axis] for axis in axes)
  return 2 * math.prod(op.shapes[0].dims) * contracted


def _convolution(op: Op, computation: Computation) -> int:
  """Returns the FLOPs of a convolution, without products with padding.

  TPU compilers represent every matrix product as a convolution, with batch
  dimensions as dilated windows; most positions of such a window are padding.
  """
  images, kernel = operand_shapes(op, computation)[:2]
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', op.attributes)
  assert labels is not None, op.attributes[:200]
  image_dims = dict(zip(labels[1], images.dims, strict=True))
  kernel_dims = dict(zip(labels[2], kernel.dims, strict=True))
  out_dims = dict(zip(labels[3], op.shapes[0].dims, strict=True))
  spatial = sorted(label for label in out_dims if label.isdigit())
  window = _window(op, len(spatial))
  valid = 1
  for axis, label in enumerate(spatial):
    valid *= _valid_positions(
      image_dims[label],
      kernel_dims[label],
      out_dims[label],
      {key: values[axis] for key, values in window.items()},
    )
  groups = op.number('batch_group_count', 1)
  # `i` of the kernel is the number of input features of one feature group.
  channels = kernel_dims['i'] * out_dims['f'] * image_dims['b'] // groups
  return 2 * channels * valid


def _window(op: Op, rank: int) -> dict[str, list[int]]:
  """Returns stride, low padding and dilations of each spatial dimension."""
  match = re.search(r'window=\{([^}]*)\}', op.attributes)
  text = match[1] if match else ''

  def values(key: str) -> list[str]:
    found = re.search(rf'\b{key}=([\d_x\-]+)', text)
    return found[1].split('x') if found else []

  def numbers(key: str, default: int) -> list[int]:
    return [int(value) for value in values(key)] or [default] * rank

  low = [int(pad.split('_')[0]) for pad in values('pad')]
  return {
    'stride': numbers('stride', 1),
    'low': low or [0] * rank,
    'base': numbers('lhs_dilate', 1),
    'dilation': numbers('rhs_dilate', 1),
  }


def _valid_positions(
  size: int, kernel: int, out: int, window: dict[str, int]
) -> int:
  """Counts pairs of output and kernel positions that read an input element.

  Output position o and kernel position k read the input at
  (o·stride + k·dilation - low) / base if this is an integer in [0, size). For
  each k, this holds for every `period`-th o of a range.
  """
  stride, base = window['stride'], window['base']
  offset = np.arange(kernel) * window['dilation'] - window['low']
  common = math.gcd(stride, base)
  period = base // common
  first = np.maximum(0, -(offset // stride))
  last = np.minimum(out - 1, ((size - 1) * base - offset) // stride)
  phase = -offset // common * pow(stride // common, -1, period) % period
  counts = (last - phase) // period - (first - 1 - phase) // period
  return int(np.sum(np.maximum(counts, 0)[offset % common == 0]))
