"""Per-path rules of an optimizer: factors of rate and decay, what stays.

A table of (pattern, settings); of the patterns that match a parameter's whole
path the first one counts, and a parameter that none matches has no rule:

    rules=(
      ('(cls|position|embedding)(/.*)?', dict(frozen=True)),
      ('.*/bias', dict(decay=0.0)),
      ('head/last/.*', dict(after='1 epochs')),
      ('head/.*', dict(lr=10.0)),
    )
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.arrays import tree
from vit_jax.config import durations
from vit_jax.errors import UserError

PyTree = Any
Table = tuple[tuple[str, 'Rule'], ...]


class Rule(NamedTuple):
  """What holds for some parameters.

  Attributes:
    lr: factor of the learning rate.
    decay: factor of the weight decay.
    frozen: whether they stay as they are; their gradients count nowhere, and
      no moments are kept.
    after: a duration from the start during which they stay as they are. They
      do not decay, their gradients count nowhere, and their moments and the
      number of updates that those are corrected by begin afterwards: what torch
      does with parameters that have no gradient.
  """

  lr: float = 1.0
  decay: float = 1.0
  frozen: bool = False
  after: str = '0 steps'


class Count(NamedTuple):
  """Updates so far, int32."""

  count: jax.Array

  @classmethod
  def init(cls, params: PyTree) -> 'Count':
    """None yet."""
    del params
    return cls(jnp.zeros((), jnp.int32))


def parse(rules: tuple[Any, ...]) -> Table:
  """Reads `config.optimizer.rules`.

  Raises:
    UserError: no pairs, no regular expression, unknown or impossible settings.
  """
  return tuple(_parse_one(rule) for rule in rules)


def _parse_one(rule: Any) -> tuple[str, Rule]:
  example = "such as ('head/.*', dict(lr=10.0))"
  if not isinstance(rule, list | tuple) or len(rule) != 2:
    raise UserError(
      f'optimizer.rules holds {rule!r}; each rule is a pair of a pattern and '
      f'its settings, {example}.'
    )
  pattern, settings = rule
  try:
    re.compile(pattern)
    result = Rule(**settings)
  except (re.error, TypeError) as error:
    raise UserError(
      f'optimizer.rules holds {rule!r} ({error}); allowed: a regular '
      f'expression and a dict of {", ".join(Rule._fields)}, {example}.'
    ) from error
  numbers = (result.lr, result.decay)
  fine = all(type(n) in (int, float) and 0 <= n < float('inf') for n in numbers)
  fine = fine and type(result.after) is str
  if not fine or type(result.frozen) is not bool:
    raise UserError(
      f'optimizer.rules holds {rule!r}; lr and decay are factors of 0 or more, '
      "frozen is True or False, and after a duration such as '1 epochs'."
    )
  durations.check(f'optimizer.rules: after of {pattern!r}', result.after)
  return pattern, result


def apply(table: Table, params: PyTree) -> PyTree:
  """A tree of `Rule`s, one for each parameter.

  Raises:
    UserError: a pattern that is the first match of no parameter.
  """
  used = set()

  def of_leaf(path: str, leaf: Any) -> Rule:
    del leaf
    for pattern, rule in table:
      if re.fullmatch(pattern, path):
        used.add(pattern)
        return rule
    return Rule()

  result = tree.map_with_path(of_leaf, params)
  idle = [pattern for pattern, _ in table if pattern not in used]
  if idle:
    paths = list(tree.flatten(params))
    raise UserError(
      f'optimizer.rules: {idle[0]!r} decides on no parameter (it matches none, '
      'or rules before it match the same); a pattern matches a whole path, '
      f'such as {paths[0]!r} or {paths[-1]!r}.'
    )
  return result


def gated(
  table: Table, steps: Callable[[str], int]
) -> optax.GradientTransformation:
  """Makes updates 0 as long as `Rule.after` says."""

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, Count]:
    del params

    def of_leaf(rule: Rule, update: jax.Array) -> jax.Array:
      start = steps(rule.after)
      return jnp.where(state.count >= start, update, 0) if start else update

    updates = jax.tree.map(
      of_leaf, apply(table, updates), updates, is_leaf=_is_rule
    )
    return updates, Count(state.count + 1)

  return optax.GradientTransformation(Count.init, update)


def delayed(
  table: Table,
  steps: Callable[[str], int],
  transformation: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """The transformation of what is not frozen, begun after its `Rule.after`.

  Parameters of one delay share a state, which does not change until then.
  """

  def of_delay(start: int) -> optax.GradientTransformation:
    def chosen(params: PyTree) -> PyTree:
      return jax.tree.map(
        lambda rule: not rule.frozen and steps(rule.after) == start,
        apply(table, params),
        is_leaf=_is_rule,
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


def scale_by(
  table: Table, factor: Callable[[Rule], float]
) -> optax.GradientTransformation:
  """Multiplies each update by a factor of its rule; frozen ones by 0."""

  def scaled(rule: Rule, update: jax.Array) -> jax.Array:
    by = 0.0 if rule.frozen else factor(rule)
    return update if by == 1 else update * by

  return optax.stateless(
    lambda updates, params: jax.tree.map(
      scaled, apply(table, updates), updates, is_leaf=_is_rule
    )
  )


def add_decayed(
  weight_decay: float | optax.Schedule,
  table: Table,
  mask: Callable[[PyTree], PyTree],
) -> optax.GradientTransformation:
  """Adds weight_decay · factor · parameter where the mask is True.

  Args:
    weight_decay: a number, or one by the number of updates.
    table: rules, for their factors.
    mask: (parameters) → a tree of whether each decays.
  """

  def added(updates: PyTree, params: PyTree, by: Any) -> PyTree:
    return jax.tree.map(
      lambda u, p, rule, decays: (
        u + by * rule.decay * p if decays and rule.decay else u
      ),
      *(updates, params, apply(table, params), mask(params)),
    )

  if not callable(weight_decay):
    return optax.stateless(lambda u, params: added(u, params, weight_decay))

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, Count]:
    by = weight_decay(state.count)
    return added(updates, params, by), Count(state.count + 1)

  return optax.GradientTransformation(Count.init, update)


def of_moving(
  table: Table, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
  """The transformation of what is not frozen: no moments for the rest."""

  def moves(params: PyTree) -> PyTree:
    rules = apply(table, params)
    return jax.tree.map(lambda rule: not rule.frozen, rules, is_leaf=_is_rule)

  return optax.masked(transformation, moves)


def _is_rule(node: Any) -> bool:
  return isinstance(node, Rule)
