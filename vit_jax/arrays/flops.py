"""Counts the FLOPs of a program in its jaxpr.

Each multiply-add of a matrix product or convolution counts as two FLOPs, and a
Pallas kernel counts as its cost estimate. Softmax, norms and element-wise
operations are left out, as is usual for MFU. A product that is computed again
to save memory (rematerialization) counts once.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

PyTree = Any
# Primitives that return their operands. A product of such results equals the
# product of the operands, so it is counted only once.
_IDENTITIES = ('optimization_barrier', 'name', 'sharding_constraint')
# What a value depends on, in increasing order: only frozen weights, also data,
# or also trained parameters.
_FROZEN, _DATA, _TRAINED = 0, 1, 2


def of_training(
  loss: Callable[..., Any], params: PyTree, *others: Any, frozen: PyTree = ()
) -> int:
  """Returns the FLOPs of a loss and its gradient.

  Only the loss is traced. For each product that depends on a parameter, two
  products of the backward pass are added, or one if the other factor is a
  frozen weight. Products in a frozen teacher, or of values from
  `jax.lax.stop_gradient`, do not depend on a parameter.

  Args:
    loss: function of parameters, other arguments and, if there are any, frozen
      weights (keyword `frozen`).
    params: parameters to differentiate by, as arrays or shapes.
    *others: other arguments of the loss.
    frozen: weights without gradients.
  """
  keywords = {'frozen': frozen} if frozen else {}
  closed = jax.make_jaxpr(loss)(params, *others, **keywords)
  arguments = (params, _TRAINED), (others, _DATA), (frozen, _FROZEN)
  kinds = [kind for leaves, kind in arguments for _ in jax.tree.leaves(leaves)]
  return _count(closed.jaxpr, kinds)[0]


def _count(jaxpr: core.Jaxpr, kinds: list[int]) -> tuple[int, list[int]]:
  """Counts the FLOPs of a jaxpr.

  Args:
    jaxpr: traced function.
    kinds: kind of each argument, such as `_TRAINED`.

  Returns:
    FLOPs, and the kind of each result, the highest of what it depends on.
  """
  kind = dict(zip(jaxpr.invars, kinds, strict=True))
  aliases: dict[Any, Any] = {}  # variable → earlier variable of the same value
  counted: dict[Any, list[Any]] = {}  # product → its results
  total = 0

  def kind_of(variable: Any) -> int:
    return _DATA if _is_literal(variable) else kind.get(variable, _DATA)

  def original(variable: Any) -> Any:
    if _is_literal(variable):  # cannot be hashed
      return variable
    return aliases.get(variable, variable)

  for equation in jaxpr.eqns:
    name = equation.primitive.name
    operands = [kind_of(variable) for variable in equation.invars]
    # The product of a frozen weight and a number is a frozen weight, too.
    variables = [v for v in equation.invars if not _is_literal(v)]
    highest = max(map(kind_of, variables), default=_DATA)
    if name == 'stop_gradient':
      highest = min(highest, _DATA)
    results = [highest] * len(equation.outvars)
    if name in _IDENTITIES and len(operands) == len(results):
      results = operands
      pairs = zip(equation.outvars, equation.invars, strict=True)
      aliases |= {result: original(operand) for result, operand in pairs}
    elif name in _PRODUCTS:
      factors = (
        id(v) if _is_literal(v) else original(v) for v in equation.invars
      )
      key = (name, *factors, str(equation.params))
      if key in counted:
        aliases |= dict(zip(equation.outvars, counted[key], strict=True))
      else:
        counted[key] = equation.outvars
        products = 1
        if highest == _TRAINED:  # gradients of both factors, or of one
          products += 1 if _FROZEN in operands[:2] else 2
        total += products * _PRODUCTS[name](equation)
    elif _inner(equation):
      count, results = _count_inner(equation, operands)
      total += count
    kind |= dict(zip(equation.outvars, results, strict=True))
  return total, [kind_of(variable) for variable in jaxpr.outvars]


def _is_literal(variable: Any) -> bool:
  return isinstance(variable, core.Literal)


def _inner(equation: Any) -> list[core.Jaxpr]:
  """Returns the jaxprs inside an equation.

  If a function has a custom derivative, only its primal jaxpr is returned.
  """
  params = equation.params
  if 'branches' in params:
    jaxprs = params['branches']
  else:
    keys = ('jaxpr', 'call_jaxpr', 'fun_jaxpr', 'body_jaxpr')
    jaxprs = [params[key] for key in keys if key in params][:1]
  return [getattr(jaxpr, 'jaxpr', jaxpr) for jaxpr in jaxprs]


def _count_inner(equation: Any, kinds: list[int]) -> tuple[int, list[int]]:
  """Counts the FLOPs of an equation that contains jaxprs.

  Args:
    equation: equation of a jaxpr.
    kinds: kind of each operand, see `_count`.

  Returns:
    FLOPs, and the kind of each result.
  """
  params, name = equation.params, equation.primitive.name
  if name == 'cond':  # counts as its most expensive branch
    # The first operand is the index of the branch.
    branches = [_count(inner, kinds[1:]) for inner in _inner(equation)]
    counts, results = zip(*branches, strict=True)
    return max(counts), [*map(max, *results)]
  (inner,) = _inner(equation)
  if name == 'while':  # counts as one iteration, as their number is unknown
    kinds = kinds[params['cond_nconsts'] :]
    consts = params['body_nconsts']
    carry = len(kinds) - consts
  elif name == 'scan':
    consts, carry = _scan_sizes(params)
  else:
    return _count(inner, kinds)
  # A carried value that depends on a parameter after one iteration can make
  # other values depend on it in the next. Repeat until nothing changes.
  while True:
    count, results = _count(inner, kinds)
    before = kinds[consts : consts + carry]
    after = [*map(max, before, results[:carry])]
    if after == before:
      return params.get('length', 1) * count, results
    kinds = [*kinds[:consts], *after, *kinds[consts + carry :]]


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
  """Returns the number of constants and of carried values of a scan."""
  if 'num_consts' in params:
    return params['num_consts'], params['num_carry']
  consts, carry, _ = params['ft_in'].unpack()  # since JAX 0.11
  return len(consts), len(carry)


def _dot_general(equation: Any) -> int:
  (contracted, _), _ = equation.params['dimension_numbers']  # of the left side
  shape = equation.invars[0].aval.shape
  depth = math.prod(shape[dim] for dim in contracted)
  return 2 * math.prod(equation.outvars[0].aval.shape) * depth


def _convolution(equation: Any) -> int:
  """Returns the FLOPs of a convolution, excluding products with padding.

  XLA's cost analysis and the paper count in the same way: for the ResNets of
  Table 6, the results differ by -0.7 to 1.4 % from the FLOPs in the paper. With
  padding, they would be 3.5 to 5 % higher.
  """
  image, kernel = (operand.aval.shape for operand in equation.invars)
  out = equation.outvars[0].aval.shape
  params, numbers = equation.params, equation.params['dimension_numbers']
  dimensions = zip(
    [image[dim] for dim in numbers.lhs_spec[2:]],
    [kernel[dim] for dim in numbers.rhs_spec[2:]],
    [out[dim] for dim in numbers.out_spec[2:]],
    params['window_strides'],
    params['padding'],
    params['lhs_dilation'],
    params['rhs_dilation'],
    strict=True,
  )
  total = 2 * math.prod(out[dim] for dim in numbers.out_spec[:2])
  total *= kernel[numbers.rhs_spec[1]]  # input channels of one output
  for size, taps, results, stride, (pad, _), base, dilation in dimensions:
    total *= _valid_positions(size, taps, results, stride, pad, base, dilation)
  return total


def _valid_positions(
  size: int,
  taps: int,
  results: int,
  stride: int,
  low: int,
  base: int,
  dilation: int,
) -> int:
  """Counts the products of a convolution without those with padding.

  Position o of the result and tap k of the kernel read the input at
  (o·stride + k·dilation - low) / base if this is an integer in [0, size). For
  each k, the second condition holds for o from `first` to `last`, and the first
  one for every `period`-th o, which equals `phase` modulo `period`.

  Args:
    size: elements of the input in one dimension.
    taps: elements of the kernel.
    results: elements of the result.
    stride: stride of the window.
    low: padding before the input.
    base: dilation of the input.
    dilation: dilation of the kernel.
  """
  offset = np.arange(taps) * dilation - low  # [taps], like the next arrays
  common = math.gcd(stride, base)
  period = base // common
  first = np.maximum(0, -(offset // stride))
  last = np.minimum(results - 1, ((size - 1) * base - offset) // stride)
  # The solution of o · stride = -offset (mod base). If `common` divides the
  # offset, both sides are divided by it; then stride / common has an inverse.
  phase = -offset // common * pow(stride // common, -1, period) % period
  counts = (last - phase) // period - (first - 1 - phase) // period
  is_integer = offset % common == 0  # for any o
  return int(np.sum(np.maximum(counts, 0)[is_integer]))


def _pallas_kernel(equation: Any) -> int:
  estimate = equation.params.get('cost_estimate')
  return estimate.flops if estimate else 0


_PRODUCTS = {
  'dot_general': _dot_general,
  'conv_general_dilated': _convolution,
  'pallas_call': _pallas_kernel,
}
