"""Per-path rules of an optimizer: factors of rate and decay, what stays.

A table of (pattern, settings); of the patterns that match a parameter's whole
path the first one counts, and a parameter that none matches has no rule:

    rules=(
      ('(cls|position|embedding)(/.*)?', dict(frozen=True)),
      ('.*/bias', dict(decay=0.0)),
      ('head/last/.*', dict(after='1 epochs')),
      ('head/.*', dict(lr=10.0)),
      ('encoder/layers/.*', dict(lr=(0.25, 0.5))),
    )

The last is for the stacked parameters of two layers, each with its own rate.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.arrays import sharding, tree
from vit_jax.config import durations
from vit_jax.errors import UserError

PyTree = Any
Table = tuple[tuple[str, 'Rule'], ...]


class Rule(NamedTuple):
  """What holds for some parameters.

  Attributes:
    lr: factor of the learning rate; or one for each layer, for parameters with
      a leading layer axis (layer decay).
    decay: factor of the weight decay.
    frozen: whether they stay as they are; their gradients count nowhere, and
      no moments are kept.
    after: a duration from the start during which they stay as they are. They
      do not decay, their gradients count nowhere, and their moments and the
      number of updates that those are corrected by begin afterwards: what torch
      does with parameters that have no gradient.
  """

  lr: float | tuple[float, ...] = 1.0
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
  rates = result.lr if isinstance(result.lr, list | tuple) else (result.lr,)
  numbers = (*rates, result.decay)
  fine = all(type(n) in (int, float) and 0 <= n < float('inf') for n in numbers)
  fine = fine and type(result.after) is str
  if not fine or type(result.frozen) is not bool:
    raise UserError(
      f'optimizer.rules holds {rule!r}; lr and decay are factors of 0 or more '
      '(lr perhaps a tuple of one for each layer), frozen is True or False, '
      "and after a duration such as '1 epochs'."
    )
  durations.check(f'optimizer.rules: after of {pattern!r}', result.after)
  return pattern, result


def apply(table: Table, params: PyTree) -> PyTree:
  """Returns a tree of `Rule`s, one for each parameter.

  Raises:
    UserError: a pattern is the first match of no parameter, or of one with
      another number of layers than the rule.
  """
  used = set()

  def of_leaf(path: str, leaf: Any) -> Rule:
    for pattern, rule in table:
      if re.fullmatch(pattern, path):
        used.add(pattern)
        _check_layers(pattern, rule, path, leaf)
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


def _check_layers(pattern: str, rule: Rule, path: str, leaf: Any) -> None:
  """Raises UserError where rates are not one for each layer of a leaf."""
  shape = getattr(leaf, 'shape', None)  # None: masked, and not to be scaled
  if isinstance(rule.lr, float | int) or shape is None:
    return
  stacked = sharding.STACKED in path
  if not stacked or shape[0] != len(rule.lr):
    layers = f'{shape[0]} layers' if stacked else 'no layer axis'
    raise UserError(
      f'optimizer.rules: {pattern!r} has {len(rule.lr)} rates, one for each '
      f'layer, and {path!r} has {layers}: give as many, or one number.'
    )


def scale_by(
  table: Table, factor: Callable[[Rule], Any]
) -> optax.GradientTransformation:
  """Multiplies each update by a factor of its rule; frozen ones by 0.

  A tuple has a factor for each layer.
  """

  def scaled(rule: Rule, update: jax.Array) -> jax.Array:
    by = 0.0 if rule.frozen else factor(rule)
    if isinstance(by, list | tuple):  # of each layer
      by = jnp.array(by, update.dtype)
      return update * by.reshape(-1, *[1] * (update.ndim - 1))
    return update if by == 1 else update * by

  return optax.stateless(
    lambda updates, params: jax.tree.map(
      scaled, apply(table, updates), updates, is_leaf=is_rule
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
      updates,
      params,
      apply(table, params),
      mask(params),
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
  """Applies a transformation to leaves that are not frozen.

  Others have no state.
  """

  def moves(params: PyTree) -> PyTree:
    rules = apply(table, params)
    return jax.tree.map(lambda rule: not rule.frozen, rules, is_leaf=is_rule)

  return optax.masked(transformation, moves)


def is_rule(node: Any) -> bool:
  """Returns whether a node of a tree is a rule."""
  return isinstance(node, Rule)
