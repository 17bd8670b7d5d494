"""Counts how often a program executes each instruction.

TPU programs do not contain the number of iterations of a loop. Therefore the
integers in the state of the loop are computed, iteration by iteration, until
the loop's condition is false. If the condition depends on data, planning fails,
because all sums would be wrong.
"""

import operator
import re
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.errors import UserError
from vit_jax.plan.hlo import Computation, Module, Op

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


class Execution(NamedTuple):
  """An instruction, its computation, and its number of executions in a step."""

  op: Op
  computation: Computation
  times: int


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
    f'The number of iterations of the loop {loop.name} '
    f'({loop.path or "no name"}) cannot be computed from its condition, so the '
    'cost of the program is unknown. Use only loops with a fixed number of '
    'iterations.'
  )


def executions(
  module: Module, *, inside_fusions: bool = False
) -> list[Execution]:
  """Returns every instruction of a step and its number of executions.

  For a conditional, only the branch with the most estimated cycles is counted.

  Args:
    module: program.
    inside_fusions: whether instructions inside fusions, which have no
      estimates, are included.
  """
  return list(_run(module, module.entry, 1, inside_fusions))


def _run(
  module: Module, name: str, times: int, inside: bool
) -> Iterator[Execution]:
  computation = module.computations[name]
  for op in computation.ops.values():
    yield Execution(op, computation, times)
    inner, repeats = [], times
    if op.opcode == 'while':
      inner = op.calls('body')
      repeats = times * trip_count(module, computation, op)
    elif op.opcode == 'conditional':
      inner = [_costliest(module, op)]
    elif op.opcode == 'call':
      inner = op.calls('to_apply') or op.calls('calls')
    elif op.opcode == 'async-start' or (op.opcode == 'fusion' and inside):
      inner = op.calls('calls')
    if inner and (inside or op.opcode == 'while' or not op.estimated_cycles):
      yield from _run(module, inner[0], repeats, inside)


def _costliest(module: Module, op: Op) -> str:
  """Returns the branch of a conditional with the most estimated cycles."""
  branches = op.calls('branch_computations') or [
    *op.calls('true_computation'),
    *op.calls('false_computation'),
  ]

  def cycles(name: str) -> int:
    return sum(
      (e.op.estimated_cycles or 0) * e.times
      for e in _run(module, name, 1, False)
    )

  return max(branches, key=cycles)
