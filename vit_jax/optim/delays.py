"""Parameters that begin to learn later than others: `Rule.after`."""

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
  """Makes updates 0 as long as `Rule.after` says."""

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, rules.Count]:
    del params

    def of_leaf(rule: rules.Rule, update: jax.Array) -> jax.Array:
      start = steps(rule.after)
      return jnp.where(state.count >= start, update, 0) if start else update

    updates = jax.tree.map(
      of_leaf, rules.apply(table, updates), updates, is_leaf=rules.is_rule
    )
    return updates, rules.Count(state.count + 1)

  return optax.GradientTransformation(rules.Count.init, update)


def delayed(
  table: rules.Table,
  steps: Callable[[str], int],
  transformation: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Applies a transformation to leaves that are not frozen, after `Rule.after`.

  Parameters with the same delay share a state, which does not change until
  then.
  """

  def of_delay(start: int) -> optax.GradientTransformation:
    def chosen(params: PyTree) -> PyTree:
      return jax.tree.map(
        lambda rule: not rule.frozen and steps(rule.after) == start,
        rules.apply(table, params),
        is_leaf=rules.is_rule,
      )

    begun = _begun_after(start, transformation) if start else transformation
    return optax.masked(begun, chosen)

  starts = sorted({0, *(steps(rule.after) for _, rule in table)})
  return optax.chain(*map(of_delay, starts))


class Begun(NamedTuple):
  """State of a transformation, and the updates before and since it began."""

  count: jax.Array
  inner: PyTree


def _begun_after(
  start: int, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Changes neither its state nor anything else for so many updates."""

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
