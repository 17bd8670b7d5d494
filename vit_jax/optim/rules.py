"""Per-path rules of an optimizer: rate and decay factors, frozen parameters.

A table of (pattern, settings); of the patterns that match a parameter's whole
path the first one counts, and a parameter that none matches has no rule:

    rules=(
      ('(cls|position|embedding)(/.*)?', dict(frozen=True)),
      ('.*/bias', dict(decay=0.0)),
      ('head/.*', dict(lr=10.0)),
    )
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from vit_jax.arrays import tree
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
  """

  lr: float = 1.0
  decay: float = 1.0
  frozen: bool = False


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
  if not fine or type(result.frozen) is not bool:
    raise UserError(
      f'optimizer.rules holds {rule!r}; lr and decay are factors of 0 or more, '
      'and frozen is True or False.'
    )
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
  weight_decay: float, table: Table, mask: Callable[[PyTree], PyTree]
) -> optax.GradientTransformation:
  """Adds weight_decay · factor · parameter where the mask is True."""

  def update(updates: PyTree, params: PyTree) -> PyTree:
    return jax.tree.map(
      lambda u, p, rule, decays: (
        u + weight_decay * rule.decay * p if decays and rule.decay else u
      ),
      *(updates, params, apply(table, params), mask(params)),
    )

  return optax.stateless(update)


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
