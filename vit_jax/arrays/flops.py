"""FLOPs of any program, counted in its jaxpr.

Counted are matrix products, convolutions and what custom kernels declare, two
FLOPs for each multiply-add; soft-max, norms and element-wise work are left out,
as is usual for MFU. What a program computes twice to save memory counts once.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

PyTree = Any
# Primitives that return their operand: what they return is counted as it.
_IDENTITIES = ('optimization_barrier', 'name', 'sharding_constraint')
_BACKWARD = 2  # products of the backward pass for each of the forward pass


def of_training(loss: Callable[..., Any], params: PyTree, *others: Any) -> int:
  """FLOPs of a loss and its gradient, from a trace of the loss alone.

  The backward pass has two products for each product of the forward pass that
  depends on a parameter; a frozen teacher, or what is behind
  `jax.lax.stop_gradient`, has none.

  Args:
    loss: a function of parameters and others; only it is traced.
    params: argument of the gradient: arrays or their shapes.
    *others: its other arguments.
  """
  closed = jax.make_jaxpr(loss)(params, *others)
  trained = len(jax.tree.leaves(params))
  depends = [i < trained for i in range(len(closed.jaxpr.invars))]
  return _count(closed.jaxpr, depends)[0]


def of_forward(function: Callable[..., Any], *arguments: Any) -> int:
  """FLOPs of a function of arrays, or of shapes."""
  closed = jax.make_jaxpr(function)(*arguments)
  return _count(closed.jaxpr, [False] * len(closed.jaxpr.invars))[0]


def _count(jaxpr: core.Jaxpr, depends: list[bool]) -> tuple[int, list[bool]]:
  """FLOPs of a jaxpr, and which of its results depend on a parameter."""
  trained = dict(zip(jaxpr.invars, depends, strict=True))
  same: dict[Any, Any] = {}  # variable → the one that it equals
  seen: dict[Any, list[Any]] = {}  # product → its results
  total = 0

  def of(variable: Any) -> bool:
    known = not isinstance(variable, core.Literal)
    return known and trained.get(variable, False)

  def first(variable: Any) -> Any:
    return variable if _literal(variable) else same.get(variable, variable)

  for equation in jaxpr.eqns:
    name = equation.primitive.name
    flags = [of(variable) for variable in equation.invars]
    out = [any(flags) and name != 'stop_gradient'] * len(equation.outvars)
    if name in _IDENTITIES and len(flags) == len(out):
      out = flags
      pairs = zip(equation.outvars, equation.invars, strict=True)
      same |= {result: first(operand) for result, operand in pairs}
    elif name in _PRODUCTS:
      operands = (
        id(first(v)) if _literal(v) else first(v) for v in equation.invars
      )
      key = (name, *operands, str(equation.params))
      if key in seen:
        same |= dict(zip(equation.outvars, seen[key], strict=True))
      else:
        seen[key] = equation.outvars
        total += _PRODUCTS[name](equation) * (1 + _BACKWARD * any(flags))
    elif _inner(equation):
      count, out = _count_inner(equation, flags)
      total += count
    trained |= dict(zip(equation.outvars, out, strict=True))
  return total, [of(variable) for variable in jaxpr.outvars]


def _literal(variable: Any) -> bool:
  return isinstance(variable, core.Literal)


def _inner(equation: Any) -> list[core.Jaxpr]:
  """Returns the jaxprs inside an equation.

  For a custom derivative, only the primal one is returned.
  """
  values = equation.params
  found = [
    values[k] for k in ('jaxpr', 'call_jaxpr', 'fun_jaxpr') if k in values
  ][:1]
  found += values.get('branches', ())
  found += [values[k] for k in ('body_jaxpr',) if k in values]
  return [getattr(each, 'jaxpr', each) for each in found]


def _count_inner(equation: Any, flags: list[bool]) -> tuple[int, list[bool]]:
  """FLOPs of an equation that holds jaxprs, and which results depend."""
  values, name = equation.params, equation.primitive.name
  if name == 'cond':  # the dearest branch; the first operand chooses
    counts = [_count(inner, flags[1:]) for inner in _inner(equation)]
    merged = [any(each) for each in zip(*(c[1] for c in counts), strict=True)]
    return max(c[0] for c in counts), merged
  (inner,) = _inner(equation)
  if name == 'while':  # no trip count: one turn
    flags = flags[values['cond_nconsts'] :]
    consts = values['body_nconsts']
    carry = len(flags) - consts
  elif name == 'scan':
    consts, carry = _scanned(values)
  else:
    return _count(inner, flags)
  while True:  # until the carry's dependence no longer grows
    count, out = _count(inner, flags)
    grown = [a or b for a, b in zip(flags[consts:], out[:carry], strict=False)]
    if grown == flags[consts : consts + carry]:
      return values.get('length', 1) * count, out
    flags = [*flags[:consts], *grown, *flags[consts + carry :]]


def _scanned(values: dict[str, Any]) -> tuple[int, int]:
  """Returns the number of constants and of carried values of a scan."""
  if 'num_consts' in values:
    return values['num_consts'], values['num_carry']
  consts, carry, _ = values['ft_in'].unpack()  # since JAX 0.11
  return len(consts), len(carry)


def _dot_general(equation: Any) -> int:
  (contracted, _), _ = equation.params['dimension_numbers']
  shape = equation.invars[0].aval.shape
  depth = math.prod(shape[dim] for dim in contracted)
  return 2 * math.prod(equation.outvars[0].aval.shape) * depth


def _convolution(equation: Any) -> int:
  """Counts the FLOPs of a convolution without products with padding.

  XLA's cost analysis and the paper count in the same way. With the padding, the
  ResNets of Table 6 take 3.5 to 5 % more than it states; without, -0.7 to 1.4
  %.
  """
  image, kernel = (each.aval.shape for each in equation.invars)
  out = equation.outvars[0].aval.shape
  settings, numbers = equation.params, equation.params['dimension_numbers']
  places = zip(
    [image[dim] for dim in numbers.lhs_spec[2:]],
    [kernel[dim] for dim in numbers.rhs_spec[2:]],
    [out[dim] for dim in numbers.out_spec[2:]],
    settings['window_strides'],
    settings['padding'],
    settings['lhs_dilation'],
    settings['rhs_dilation'],
    strict=True,
  )
  total = 2 * math.prod(out[dim] for dim in numbers.out_spec[:2])
  total *= kernel[numbers.rhs_spec[1]]  # inputs of one output
  for size, taps, results, stride, (before, _), gaps, spread in places:
    at = stride * np.arange(results)[:, None] + spread * np.arange(taps)
    at -= before
    inside = (at >= 0) & (at <= gaps * (size - 1)) & (at % gaps == 0)
    total *= int(inside.sum())
  return total


def _kernel(equation: Any) -> int:
  estimate = equation.params.get('cost_estimate')
  return estimate.flops if estimate else 0


_PRODUCTS = {
  'dot_general': _dot_general,
  'conv_general_dilated': _convolution,
  'pallas_call': _kernel,
}
