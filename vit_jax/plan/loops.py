"""How often a program executes each instruction.

TPU programs do not state how often a loop runs; the number follows from the
loop's condition, start and step. If it cannot be determined, planning fails,
because all sums would be wrong.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from vit_jax.errors import UserError
from vit_jax.plan.hlo import Computation, Module, Op

_PASSED_ON = ('copy', 'bitcast', 'convert', 'reshape')


class Execution(NamedTuple):
  """An instruction, its computation, and how often a step executes it."""

  op: Op
  computation: Computation
  times: int


class Carried(NamedTuple):
  """An element of a loop's state as an iteration starts, plus `offset`."""

  index: int
  offset: int = 0


class Scope(NamedTuple):
  """A computation, and the values of its parameters if it is inlined.

  Attributes:
    computation: computation in which names are resolved.
    arguments: (scope, name) of each operand of the fusion; None in a loop.
  """

  computation: Computation
  arguments: tuple[tuple[Any, str], ...] | None = None


def resolve(module: Module, scope: Scope, name: str) -> int | Carried | None:
  """Returns a scalar as a number, or as an element of a loop plus a number."""
  op = scope.computation.ops.get(name)
  if op is None:
    return None
  if op.opcode == 'constant':
    value = op.literal.strip()
    return int(value) if re.fullmatch(r'-?\d+', value) else None
  if op.opcode in _PASSED_ON:
    return resolve(module, scope, op.operands[0])
  if op.opcode == 'parameter' and scope.arguments is not None:
    return resolve(module, *scope.arguments[int(op.literal)])
  if op.opcode == 'fusion':
    inner = _inlined(module, scope, op)
    return resolve(module, inner, inner.computation.root)
  if op.opcode == 'get-tuple-element':
    return _element(module, scope, op)
  if op.opcode in ('add', 'subtract'):
    left, right = (resolve(module, scope, operand) for operand in op.operands)
    return _sum(left, right, 1 if op.opcode == 'add' else -1)
  return None


def _inlined(module: Module, scope: Scope, op: Op) -> Scope:
  arguments = tuple((scope, operand) for operand in op.operands)
  return Scope(module.computations[op.calls('calls')[0]], arguments)


def _element(module: Module, scope: Scope, op: Op) -> int | Carried | None:
  """Resolves an element of a tuple."""
  index = op.number('index')
  source = scope.computation.ops[op.operands[0]]
  if source.opcode == 'fusion':
    scope = _inlined(module, scope, source)
    source = scope.computation.ops[scope.computation.root]
  if source.opcode == 'tuple':
    return resolve(module, scope, source.operands[index])
  if source.opcode == 'parameter' and scope.arguments is None:
    return Carried(index)
  return None


def _sum(
  left: int | Carried | None, right: int | Carried | None, sign: int
) -> int | Carried | None:
  if isinstance(left, int) and isinstance(right, Carried) and sign > 0:
    left, right = right, left
  if left is None or not isinstance(right, int):
    return None
  if isinstance(left, Carried):
    return Carried(left.index, left.offset + sign * right)
  return left + sign * right


def trip_count(module: Module, computation: Computation, loop: Op) -> int:
  """Returns how often a `while` runs its body.

  Raises:
    UserError: the loop has no counter with a known start, step and end.
  """
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if known:  # CPU and GPU compilers state it
    return int(known[1])
  condition = Scope(module.computations[loop.calls('condition')[0]])
  count = None
  for counter, end, direction in _comparisons(module, condition):
    limit = _start(module, computation, loop, end)
    if not isinstance(counter, Carried) or limit is None:
      continue
    first = _element_of(
      module, Scope(computation), loop.operands[0], counter.index
    )
    step = _step(module, loop, counter.index)
    if isinstance(first, int) and step:
      distance = limit - first - counter.offset
      count = _iterations(distance, step, direction)
  if count is None:
    raise UserError(
      f'The number of iterations of the loop {loop.name} '
      f'({loop.path or "no name"}) does not follow from its condition, so the '
      'cost of the program is unknown. Use only loops with a fixed number of '
      'iterations.'
    )
  return count


def _element_of(
  module: Module, scope: Scope, holder: str, index: int
) -> int | Carried | None:
  """Resolves an element of a loop's state in the tuple that makes the state."""
  made = scope.computation.ops[holder]
  if made.opcode != 'tuple':
    return None
  return resolve(module, scope, made.operands[index])


def _step(module: Module, loop: Op, index: int) -> int | None:
  """Returns how much an iteration adds to an element of the state, if known."""
  body = Scope(module.computations[loop.calls('body')[0]])
  after = _element_of(module, body, body.computation.root, index)
  if not isinstance(after, Carried) or after.index != index:
    return None
  return after.offset


def _start(
  module: Module,
  computation: Computation,
  loop: Op,
  value: int | Carried | None,
) -> int | None:
  """Returns a value that no iteration changes as a number, or None."""
  if not isinstance(value, Carried):
    return value
  if _step(module, loop, value.index) != 0:
    return None
  start = _element_of(module, Scope(computation), loop.operands[0], value.index)
  return start + value.offset if isinstance(start, int) else None


def _comparisons(
  module: Module, condition: Scope
) -> list[tuple[int | Carried | None, int | Carried | None, str]]:
  """Returns a loop's condition as (counter, limit, direction), both ways."""
  scope = condition
  op = scope.computation.ops[scope.computation.root]
  while op.opcode == 'fusion':
    scope = _inlined(module, scope, op)
    op = scope.computation.ops[scope.computation.root]
  match = re.search(r'direction=([A-Z]{2})', op.attributes)
  if op.opcode != 'compare' or not match:
    return []
  left, right = (resolve(module, scope, operand) for operand in op.operands)
  mirrored = match[1].translate(str.maketrans('LG', 'GL'))
  return [(left, right, match[1]), (right, left, mirrored)]


def _iterations(distance: int, step: int, direction: str) -> int | None:
  """Counts iterations of `for (i = 0; i <direction> distance; i += step)`."""
  if direction in ('GT', 'GE'):
    distance, step = -distance, -step
  if direction in ('LE', 'GE'):
    distance += 1
  if direction == 'NE':
    return distance // step if distance * step >= 0 == distance % step else None
  if step <= 0 or direction not in ('LT', 'LE', 'GT', 'GE'):
    return None
  return max(0, -(-distance // step))


def executions(
  module: Module, *, inside_fusions: bool = False
) -> list[Execution]:
  """Returns every instruction of a step and how often the step executes it.

  Conditionals are counted as the branch with the most estimated cycles.

  Args:
    module: the program.
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
