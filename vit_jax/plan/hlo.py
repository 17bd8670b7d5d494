"""Parses those parts of the compiler's optimized HLO text that plans use."""

import dataclasses
import functools
import re
from typing import NamedTuple

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_NAME = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = ')
_OPCODE = re.compile(r'\s*([a-z][\w\-]*)\(')
_SHAPE = re.compile(r'\b([a-z]+\d*\w*)\[([\d,<=]*)\]')
_REFERENCE = re.compile(r'%([\w.\-]+)')


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
    literal: text between the parentheses, such as the value of a constant.
    attributes: text after the parentheses.
  """

  name: str
  opcode: str
  type: str
  operands: tuple[str, ...]
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
    valid = match is not None and 0 <= int(match[1]) < 2**62
    return int(match[1]) if match and valid else None

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


def _parse_op(line: str) -> tuple[Op, bool] | None:
  """Parses an instruction.

  Returns:
    The instruction, and whether it is the root; None for any other line.
  """
  head = _NAME.match(line)
  if not head:
    return None
  start = head.end()
  tuple_end = _closing(line, start) if line[start] == '(' else start
  end = line.find(' ', tuple_end) if tuple_end == start else tuple_end
  opcode = _OPCODE.match(line, end)
  if not opcode:
    return None
  close = _closing(line, opcode.end() - 1)
  inside = line[opcode.end() : close - 1]
  op = Op(
    name=head[2],
    opcode=opcode[1],
    type=line[start:end],
    operands=tuple(_REFERENCE.findall(inside)),
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
    elif parsed := _parse_op(line):
      op, is_root = parsed
      ops[op.name] = op
      root = op.name if is_root else root
  if entry not in computations:
    raise ValueError('the HLO text has no ENTRY computation')
  return Module(computations, entry)
