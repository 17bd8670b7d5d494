"""Delayed training of some of the parameters, see `Rule.after`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.optim import rules

PyTree = Any


def gated(
  table: rules.Table, steps: Callable[[str], int]
) -> optax.GradientTransformation:
  """Returns a transformation that sets updates to 0 during `Rule.after`.

  Args:
    table: rules of the optimizer.
    steps: function that converts a duration ('1 epochs') to updates.
  """

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, rules.Count]:
    del params

    def gate(rule: rules.Rule, update: jax.Array) -> jax.Array:
      start = steps(rule.after)
      return jnp.where(state.count >= start, update, 0) if start else update

    updates = jax.tree.map(
      gate, rules.apply(table, updates), updates, is_leaf=rules.is_rule
    )
    return updates, rules.Count(state.count + 1)

  return optax.GradientTransformation(rules.Count.init, update)


def delayed(
  table: rules.Table,
  steps: Callable[[str], int],
  transformation: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Restricts a transformation to leaves whose `Rule.after` has passed.

  Leaves with the same delay share a state, which does not change during the
  delay. Frozen leaves have no state.

  Args:
    table: rules of the optimizer.
    steps: function that converts a duration ('1 epochs') to updates.
    transformation: transformation of all leaves, such as Adam's.
  """

  def with_delay(start: int) -> optax.GradientTransformation:
    def has_delay(params: PyTree) -> PyTree:
      return jax.tree.map(
        lambda rule: not rule.frozen and steps(rule.after) == start,
        rules.apply(table, params),
        is_leaf=rules.is_rule,
      )

    later = _apply_after(start, transformation) if start else transformation
    return optax.masked(later, has_delay)

  starts = sorted({0, *(steps(rule.after) for _, rule in table)})
  return optax.chain(*map(with_delay, starts))


class Begun(NamedTuple):
  """State of a transformation that starts after a number of updates.

  Attributes:
    count: number of updates so far, including those before the start, int32.
    inner: state of the transformation.
  """

  count: jax.Array
  inner: PyTree


def _apply_after(
  start: int, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Returns a transformation that is applied only after `start` steps.

  In the first `start` steps, its state does not change, and the updates are
  returned unchanged.
  """

  def init(params: PyTree) -> Begun:
    return Begun(jnp.zeros((), jnp.int32), transformation.init(params))

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, Begun]:
    new, inner = transformation.update(updates, state.inner, params)
    new, inner = jax.tree.map(
      lambda yes, no: jnp.where(state.count >= start, yes, no),
      (new, inner),
      (updates, state.inner),
    )
    return new, Begun(state.count + 1, inner)

  return optax.GradientTransformation(init, update)
