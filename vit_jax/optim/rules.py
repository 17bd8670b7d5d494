"""Factors of learning rate and decay, frozen and delayed leaves, by path.

Rules are pairs (pattern, settings). The first rule whose pattern matches the
whole path of a parameter applies to it; `Rule()` applies if there is none:

    rules=(
      ('(cls|position|embedding)(/.*)?', dict(frozen=True)),
      ('.*/bias', dict(decay=0.0)),
      ('head/last/.*', dict(after='1 epochs')),
      ('head/.*', dict(lr=10.0)),
      ('encoder/layers/.*', dict(lr=(0.25, 0.5))),
    )

The last rule applies to stacked parameters of two layers, and has one factor of
the learning rate for each layer.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.arrays import sharding, tree
from vit_jax.config import durations
from vit_jax.errors import UserError, check_range

PyTree = Any
Rules = tuple[tuple[str, 'Rule'], ...]
LayersAbove = Callable[[str], int | tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Rule:
  """Settings for some of the parameters; a leaf of pytrees.

  Attributes:
    lr: factor of the learning rate; a tuple of one factor per layer for
      parameters with a leading layer axis.
    decay: factor of the weight decay.
    frozen: whether the parameters never change. They have neither gradients nor
      moments.
    after: duration at the start of training in which the parameters do not
      change. They do not decay, and their gradients do not count in the norm
      for clipping. Their moments, and the update count for the bias correction
      of the moments, start afterwards. PyTorch treats parameters without a
      gradient in the same way.
    lr_after: duration at the start of training in which the learning rate is 0.
      In contrast to `after`, moments are updated and gradients count in the
      norm for clipping (DINOv2).
  """

  lr: float | tuple[float, ...] = 1.0
  decay: float = 1.0
  frozen: bool = False
  after: str = '0 steps'
  lr_after: str = '0 steps'


class Count(NamedTuple):
  """Number of updates so far, int32."""

  count: jax.Array

  @classmethod
  def init(cls, params: PyTree) -> 'Count':
    """Returns a count of 0."""
    return cls(jnp.zeros((), jnp.int32))


def parse(rules: tuple[Any, ...]) -> Rules:
  """Parses `config.optimizer.rules`.

  Args:
    rules: pairs of a regular expression and a dict of fields of `Rule`.

  Raises:
    UserError: a rule is not a pair, its pattern is not a regular expression, or
      its settings are unknown or outside their range.
  """
  return tuple(_parse_one(rule) for rule in rules)


def _parse_one(rule: Any) -> tuple[str, Rule]:
  try:
    pattern, settings = rule
    re.compile(pattern)
    result = Rule(**settings)
    durations.check('after', result.after)
    durations.check('lr_after', result.lr_after)
    rates = result.lr if isinstance(result.lr, list | tuple) else (result.lr,)
    for factor in (*rates, result.decay):
      if type(factor) not in (int, float):  # excludes bool
        raise TypeError(f'{factor!r} is not a number')
      check_range('a factor', factor, at_least=0)
    if type(result.frozen) is not bool:
      raise TypeError(f'frozen is {result.frozen!r}')
  except (re.error, TypeError, ValueError, UserError) as error:
    raise UserError(
      f'optimizer.rules contains {rule!r} ({str(error).rstrip(".")}); a rule '
      'is a pair of a regular expression and a dict: factors of 0 or more lr '
      '(also one for each layer) and decay, frozen=True or False, durations '
      "after and lr_after ('5 epochs'), as in ('head/.*', dict(lr=10.0))."
    ) from error
  return pattern, result


def match(rules: Rules, params: PyTree) -> PyTree:
  """Returns a tree of `Rule`s, one for each parameter.

  Raises:
    UserError: a pattern is not the first match of any parameter, or a rule and
      its parameter have different numbers of layers.
  """
  used = set()

  def first_match(path: str, leaf: Any) -> Rule:
    for pattern, rule in rules:
      if re.fullmatch(pattern, path):
        used.add(pattern)
        _check_layers(pattern, rule, path, leaf)
        return rule
    return Rule()

  result = tree.map_with_path(first_match, params)
  unused = [pattern for pattern, _ in rules if pattern not in used]
  if unused:
    paths = list(tree.flatten(params))
    raise UserError(
      f'optimizer.rules: {unused[0]!r} applies to no parameter, or only to '
      'those of earlier rules; a pattern must match a whole path, such as '
      f'{paths[0]!r} or {paths[-1]!r}.'
    )
  return result


def trained(rules: Rules, params: PyTree) -> PyTree:
  """Returns the parameters with None in place of frozen ones."""
  return jax.tree.map(
    lambda leaf, rule: None if rule.frozen else leaf,
    params,
    match(rules, params),
  )


def _check_layers(pattern: str, rule: Rule, path: str, leaf: Any) -> None:
  """Checks that a rule has one learning-rate factor for each stacked layer.

  Raises:
    UserError: the numbers of rates and layers differ.
  """
  shape = getattr(leaf, 'shape', None)  # masked leaves have no shape
  if isinstance(rule.lr, float | int) or shape is None:
    return
  stacked = sharding.STACKED in path
  if not stacked or shape[0] != len(rule.lr):
    layers = f'{shape[0]} layers' if stacked else 'no layer axis'
    raise UserError(
      f'optimizer.rules: {pattern!r} has {len(rule.lr)} rates, and {path!r} '
      f'has {layers}: give one rate per layer, or a single number.'
    )


def scale_by_rates(
  rules: Rules, layer_decay: float, layers_above: LayersAbove
) -> optax.GradientTransformation:
  """Returns a transformation that multiplies updates by learning-rate factors.

  The factor of a parameter is that of its rule, times `layer_decay` to the
  power of the number of layers above it. Updates of frozen parameters become 0.

  Args:
    rules: rules of the optimizer.
    layer_decay: factor from layer to layer; 1 for none.
    layers_above: see `optimizers.Setting`.
  """

  def scaled(path: str, rule: Rule, update: jax.Array) -> jax.Array:
    if rule.frozen:
      return jnp.zeros_like(update)
    above = layers_above(path) if layer_decay != 1 else 0
    powers = [layer_decay**n for n in np.ravel(above).tolist()]
    scale = np.multiply(rule.lr, powers if np.ndim(above) else powers[0])
    if np.ndim(scale):  # one factor per layer
      scale = jnp.array(scale, update.dtype)
      return update * scale.reshape(-1, *[1] * (update.ndim - 1))
    return update if scale == 1 else update * float(scale)

  return optax.stateless(
    lambda updates, params: tree.map_with_path(
      scaled, match(rules, updates), updates
    )
  )


def add_decayed(
  weight_decay: float | optax.Schedule,
  rules: Rules,
  decays: Callable[[PyTree], PyTree],
) -> optax.GradientTransformation:
  """Returns a transformation that adds weight_decay · factor · parameter.

  Args:
    weight_decay: number, or function of the update count.
    rules: rules of the optimizer, which contain the factors.
    decays: function of parameters to a tree of whether each of them decays.
  """

  def added(updates: PyTree, params: PyTree, value: Any) -> PyTree:
    return jax.tree.map(
      lambda u, p, rule, decay: u + value * rule.decay * p if decay else u,
      updates,
      params,
      match(rules, params),
      decays(params),
    )

  if not callable(weight_decay):
    return optax.stateless(lambda u, params: added(u, params, weight_decay))

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, Count]:
    value = weight_decay(state.count)
    return added(updates, params, value), Count(state.count + 1)

  return optax.GradientTransformation(Count.init, update)


def without_frozen(
  rules: Rules, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Restricts a transformation to the leaves that no rule freezes.

  Frozen leaves have no state.
  """

  def is_trained(params: PyTree) -> PyTree:
    return jax.tree.map(lambda rule: not rule.frozen, match(rules, params))

  return optax.masked(transformation, is_trained)


def gated(
  rules: Rules, start_of: Callable[[Rule], int]
) -> optax.GradientTransformation:
  """Returns a transformation that sets updates to 0 until their rule starts.

  Args:
    rules: rules of the optimizer.
    start_of: function from a rule to the number of updates before its start.
  """

  def update(
    updates: PyTree, state: Any, params: PyTree = None
  ) -> tuple[PyTree, Count]:

    def gate(rule: Rule, update: jax.Array) -> jax.Array:
      start = start_of(rule)
      return jnp.where(state.count >= start, update, 0) if start else update

    updates = jax.tree.map(gate, match(rules, updates), updates)
    return updates, Count(state.count + 1)

  return optax.GradientTransformation(Count.init, update)


def delayed(
  rules: Rules,
  steps: Callable[[str], int],
  transformation: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Restricts a transformation to leaves whose `Rule.after` has passed.

  Leaves with the same delay share a state, which does not change during the
  delay. Frozen leaves have no state.

  Args:
    rules: rules of the optimizer.
    steps: function that converts a duration ('1 epochs') to updates.
    transformation: transformation of all leaves, such as Adam's.
  """

  def with_delay(start: int) -> optax.GradientTransformation:
    def has_delay(params: PyTree) -> PyTree:
      return jax.tree.map(
        lambda rule: not rule.frozen and steps(rule.after) == start,
        match(rules, params),
      )

    later = _apply_after(start, transformation) if start else transformation
    return optax.masked(later, has_delay)

  starts = sorted({0, *(steps(rule.after) for _, rule in rules)})
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
