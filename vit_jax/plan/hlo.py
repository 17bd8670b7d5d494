"""Parses optimized HLO text, and counts bytes and executions.

TPU programs do not contain the number of iterations of a loop. Therefore the
integers in the state of the loop are computed, iteration by iteration, until
the loop's condition is false. If the condition depends on data, planning fails,
because all sums would be wrong.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from vit_jax.errors import UserError

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_NAME = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = ')
_OPCODE = re.compile(r'\s*([a-z][\w\-]*)\(')
_SHAPE = re.compile(r'\b([a-z]+\d*\w*)\[([\d,<=]*)\]')
_REFERENCE = re.compile(r'%([\w.\-]+)')
_MAX_ITERATIONS = 100_000  # longer loops are considered endless
_INTEGER = re.compile(r'(pred|[su]\d+)\[\]')  # type of a scalar
_ARITHMETIC = {
  'add': operator.add,
  'subtract': operator.sub,
  'EQ': operator.eq,
  'NE': operator.ne,
  'LT': operator.lt,
  'LE': operator.le,
  'GT': operator.gt,
  'GE': operator.ge,
}
# An integer, the elements of a tuple, or None for anything else.
Value = int | tuple['Value', ...] | None


class Shape(NamedTuple):
  """Element type and dimensions of an array."""

  dtype: str
  dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Op:
  """One instruction.

  Attributes:
    name: name, which is unique in the computation.
    opcode: 'fusion', 'while', …
    type: type of the result, as text.
    operands: names of the operands.
    reads: shapes of the arrays in the operands.
    literal: text between the parentheses, such as the value of a constant.
    attributes: text after the parentheses.
  """

  name: str
  opcode: str
  type: str
  operands: tuple[str, ...]
  reads: tuple[Shape, ...]
  literal: str
  attributes: str

  @functools.cached_property
  def shapes(self) -> tuple[Shape, ...]:
    """Shapes of the arrays in the result."""
    return shapes(self.type)

  @functools.cached_property
  def estimated_cycles(self) -> int | None:
    """Cycles of one execution, as estimated by the compiler, or None."""
    match = re.search(r'"estimated_cycles":"?(-?\d+)', self.attributes)
    cycles = int(match[1]) if match else -1
    # Negative and huge numbers (about 2**63) stand for an unknown one.
    return cycles if 0 <= cycles < 2**62 else None

  @property
  def path(self) -> str:
    """Path of the JAX operation that was compiled to this one (`op_name`)."""
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
    return match[1] if match else ''

  def calls(self, attribute: str) -> list[str]:
    """Returns the names of the computations in an attribute, such as 'body'."""
    match = re.search(
      rf'\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)', self.attributes
    )
    return _REFERENCE.findall(match[1]) if match else []

  def number(self, attribute: str, default: int = 0) -> int:
    """Returns the value of a numeric attribute, such as 'index'."""
    match = re.search(rf'\b{attribute}=(\d+)', self.attributes)
    return int(match[1]) if match else default


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions by name; `root` is the name of the one that is returned."""

  name: str
  ops: dict[str, Op]
  root: str


@dataclasses.dataclass(frozen=True)
class Module:
  """Computations by name; `entry` is the name of the main computation."""

  computations: dict[str, Computation]
  entry: str


def shapes(text: str) -> tuple[Shape, ...]:
  """Parses the shapes in a type such as `(bf16[8,128]{1,0}, s32[])`."""
  return tuple(
    Shape(dtype, tuple(int(d.lstrip('<=')) for d in dims.split(',') if d))
    for dtype, dims in _SHAPE.findall(text)
  )


def _closing(text: str, start: int) -> int:
  """Returns the index after the bracket that closes the one at `start`."""
  depth = 0
  for match in re.finditer(r'[()]', text[start:]):
    depth += 1 if match[0] == '(' else -1
    if depth == 0:
      return start + match.end()
  raise ValueError(f'unbalanced brackets in {text[:200]!r}')


def _parse_op(line: str, before: Mapping[str, Op]) -> tuple[Op, bool] | None:
  """Parses an instruction.

  Args:
    line: line of the text.
    before: instructions of the computation before this one, by name.

  Returns:
    The instruction, and whether it is the root; None for any other line.
  """
  head = _NAME.match(line)
  if not head:
    return None
  start = head.end()
  is_tuple = line[start] == '('  # its type contains spaces
  end = _closing(line, start) if is_tuple else line.find(' ', start)
  opcode = _OPCODE.match(line, end)
  if not opcode:
    return None
  close = _closing(line, opcode.end() - 1)
  inside = line[opcode.end() : close - 1]
  operands = tuple(_REFERENCE.findall(inside))
  known = [before[name] for name in operands if name in before]
  op = Op(
    name=head[2],
    opcode=opcode[1],
    type=line[start:end],
    operands=operands,
    reads=tuple(shape for operand in known for shape in operand.shapes),
    literal=inside,
    attributes=line[close:],
  )
  return op, head[1] is not None


def parse(text: str) -> Module:
  """Parses the text that `compiled.as_text()` returns."""
  computations, entry = {}, ''
  name, ops, root = '', {}, ''
  for line in text.splitlines():
    head = _HEAD.match(line)
    if head:
      name, ops, root = head[2], {}, ''
      entry = name if head[1] else entry
    elif line.startswith('}'):
      computations[name] = Computation(name, ops, root)
    elif parsed := _parse_op(line, ops):
      op, is_root = parsed
      ops[op.name] = op
      root = op.name if is_root else root
  return Module(computations, entry)


def num_bytes(shapes: Iterable[Shape]) -> int:
  """Returns the size of arrays in bytes, without the padding of layouts."""
  total = 0
  for dtype, dims in shapes:
    digits = re.search(r'\d+', dtype)  # f32, bf16, s4, f8e4m3fn, c64
    bits = int(digits[0]) if digits else 0  # no data, such as a token
    if dtype == 'pred':
      bits = 8
    total += bits * math.prod(dims) // 8
  return total


def bytes_moved(op: Op) -> int:
  """Returns the bytes that an instruction reads and writes.

  If an array is sliced or updated in place, only the slice or the update is
  counted: it is read once and written once. If the compiler keeps an operand on
  the chip, the result is an upper bound.
  """
  if op.opcode == 'dynamic-update-slice':
    updates = op.reads[1:2]  # after the updated array
    return 2 * num_bytes(updates)
  if op.opcode in ('slice', 'dynamic-slice'):
    return 2 * num_bytes(op.shapes)
  return num_bytes(op.reads) + num_bytes(op.shapes)


def dimensions(op: Op, kind: str) -> int:
  """Returns the product of the batch or contracting dimensions of a product.

  XLA writes them as `lhs_batch_dims={0}`, and in the settings of a library call
  as `"lhs_batch_dimensions":["0"]`.
  """
  pattern = rf'lhs_{kind}_dim(?:ension)?s"?[=:][{{\[]([^\]}}]*)'
  match = re.search(pattern, op.attributes)
  axes = re.findall(r'\d+', match[1]) if match else []
  return math.prod(op.reads[0].dims[int(axis)] for axis in axes)


def evaluate(
  module: Module,
  computation: Computation,
  name: str,
  arguments: tuple[Value, ...] = (),
) -> Value:
  """Computes the integers in the result of an instruction.

  Args:
    module: program.
    computation: computation that contains the instruction.
    name: name of the instruction.
    arguments: values of the computation's parameters; None if unknown.

  Returns:
    An integer or a tuple, with None for each value that is not known.
  """
  op = computation.ops[name]
  if op.opcode == 'parameter':
    index = int(op.literal)
    return arguments[index] if index < len(arguments) else None
  if op.opcode == 'constant':
    return int(op.literal) if re.fullmatch(r'-?\d+', op.literal) else None
  # An array or a float is not evaluated, and neither are its operands.
  if not (op.type.startswith('(') or _INTEGER.match(op.type)):
    return None
  operands = tuple(
    evaluate(module, computation, operand, arguments) for operand in op.operands
  )
  match op.opcode:
    case 'tuple':
      return operands
    case 'copy' | 'bitcast' | 'convert' | 'reshape':
      return operands[0]
    case 'get-tuple-element':
      source = operands[0]
      return source[op.number('index')] if isinstance(source, tuple) else None
    case 'fusion':
      inner = module.computations[op.calls('calls')[0]]
      return evaluate(module, inner, inner.root, operands)
    case 'add' | 'subtract' | 'compare':
      # Only a comparison has a direction.
      direction = re.search(r'direction=([A-Z]{2})', op.attributes)
      function = _ARITHMETIC[direction[1] if direction else op.opcode]
      known = all(isinstance(operand, int) for operand in operands)
      return int(function(*operands)) if known else None
  return None


def trip_count(module: Module, computation: Computation, loop: Op) -> int:
  """Returns the number of iterations of a `while` instruction.

  Raises:
    UserError: the number depends on data, or the loop never ends.
  """
  # Compilers for CPUs and GPUs write the number into the program.
  written = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if written:
    return int(written[1])
  condition = module.computations[loop.calls('condition')[0]]
  body = module.computations[loop.calls('body')[0]]
  state = evaluate(module, computation, loop.operands[0])
  for count in range(_MAX_ITERATIONS):
    continues = evaluate(module, condition, condition.root, (state,))
    if continues is None:
      break
    if not continues:
      return count
    previous, state = state, evaluate(module, body, body.root, (state,))
    if state == previous:
      break
  raise UserError(
    f'The loop {loop.name} ({loop.path or "no name"}) has no fixed number of '
    'iterations, so the cost of the program is unknown.'
  )


def executions(
  module: Module, name: str | None = None, times: int = 1
) -> Iterator[tuple[Op, Computation, int]]:
  """Yields the instructions of a step, their computations and executions.

  For a conditional, only the branch with the most estimated cycles is counted.
  Instructions inside fusions are not included.

  Args:
    module: program.
    name: name of a computation; None for the whole program.
    times: number of executions of the computation.
  """
  computation = module.computations[name or module.entry]
  for op in computation.ops.values():
    yield op, computation, times
    inner, repeats = [], times  # computation that runs, and its executions
    if op.opcode == 'while':
      inner = op.calls('body')
      repeats = times * trip_count(module, computation, op)
    elif op.opcode == 'conditional':
      inner = [_costliest(module, op)]
    elif op.opcode == 'call':
      inner = op.calls('to_apply') or op.calls('calls')
    elif op.opcode == 'async-start':
      inner = op.calls('calls')
    # The estimate of any other instruction includes what it calls.
    if inner and (op.opcode == 'while' or not op.estimated_cycles):
      yield from executions(module, inner[0], repeats)


def _costliest(module: Module, op: Op) -> str:
  """Returns the branch of a conditional with the most estimated cycles."""
  branches = op.calls('branch_computations') or [
    *op.calls('true_computation'),
    *op.calls('false_computation'),
  ]

  def cycles(name: str) -> int:
    return sum(
      (op.estimated_cycles or 0) * times
      for op, _, times in executions(module, name)
    )

  return max(branches, key=cycles)
