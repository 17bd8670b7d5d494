"""Optimizers: constructors of the config's section `optimizer`.

All but `lars` have the keys of `Common` in addition to their own: clipping,
weight decay and rules.

In most other projects, each layer has its own tensors, and query, key and value
share one. `tensor_norms` returns the norms of such tensors, which make clipping
and trust ratios the same as there.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.arrays import sharding, tree
from vit_jax.config import schema
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.optim import rules as rules_lib
from vit_jax.optim.schedule import cosine

PyTree = Any
KINDS = ('global', 'tensor', 'module')
_EPSILON = 1e-6  # added to the norm, as in PyTorch
Decays = Callable[[PyTree], PyTree]  # parameters → whether each of them decays
Adapt = Callable[[Decays], optax.GradientTransformation]


def naming(key: str, joined: tuple[str, ...]) -> Callable[[str], str]:
  """Returns a function from a leaf's path to the name of its tensor.

  Args:
    key: key of the config, for messages.
    joined: regular expressions for parts of a path. Leaves whose paths differ
      only in such parts count as one tensor. 'query|key|value' joins the three
      leaves that most projects keep in one matrix.

  Raises:
    UserError: a pattern is not a regular expression.
  """
  try:
    patterns = [re.compile(pattern) for pattern in joined]
  except re.error as error:
    raise UserError(
      f'{key} is {joined} ({error}); give regular expressions, such as '
      "'query|key|value'."
    ) from error

  def name(path: str) -> str:
    for pattern in patterns:
      path = pattern.sub('*', path)
    return path

  return name


def tensor_norms(
  values: PyTree, name: Callable[[str], str], by_layer: bool = True
) -> dict[str, Float[Array, '...']]:
  """Returns the norm of the tensor that contains each leaf, by path.

  Args:
    values: arrays.
    name: result of `naming`.
    by_layer: whether each layer of a stack has a norm of its own.

  Returns:
    Arrays that can be broadcast to the leaves: `[layers, 1, …]` for a stack of
    layers, which has a norm for each layer, and a scalar for other leaves.
  """
  flat = tree.flatten(values)
  squares: dict[str, Array] = {}
  for path, leaf in flat.items():
    # The first axis of stacked leaves, that of the layers, is not summed over.
    first = int(by_layer and sharding.STACKED in path)
    own = jnp.sum(jnp.square(leaf), axis=tuple(range(first, leaf.ndim)))
    squares[name(path)] = squares.get(name(path), 0) + own
  norms = {path: jnp.sqrt(squares[name(path)]) for path in flat}
  return {  # scalar, or [layers] → [layers, 1, …]
    path: norm.reshape(*norm.shape, *[1] * (flat[path].ndim - norm.ndim))
    for path, norm in norms.items()
  }


def clipping(
  limit: float, kind: str, joined: tuple[str, ...] = ()
) -> optax.GradientTransformation:
  """Returns a transformation that clips gradients by their norm.

  With 'tensor' and 'module', the gradient g of a tensor becomes g · min(1,
  limit / (|g| + 1e-6)). Each layer of a stack is a separate tensor. All leaves
  of a module, which is the first name of a path (`model` or `head`), count as
  one tensor.

  Args:
    limit: largest norm, above 0.
    kind: 'global' to limit the norm of all gradients together, 'tensor' to
      limit the norm of each tensor, or 'module' to limit that of each module.
    joined: regular expressions that join leaves into one tensor, or modules
      into one, see `naming`; not for the kind 'global'.

  Raises:
    UserError: the kind is unknown, a pattern is not a regular expression, or
      there are patterns and the kind is 'global'.

  References: the code of DINO (arXiv 2104.14294); by module, that of DINOv2
  (arXiv 2304.07193).
  """
  check_choice('optimizer.clip', kind, KINDS)
  tensor, by_module = naming('optimizer.clip_joined', joined), kind == 'module'
  if kind == 'global' and joined:
    raise UserError(
      f'optimizer.clip_joined is {joined}, and optimizer.clip is {kind!r}. '
      "Set optimizer.clip to 'tensor' or 'module', or leave clip_joined empty."
    )
  if kind == 'global':
    return optax.clip_by_global_norm(limit)

  def name(path: str) -> str:
    return tensor(path.partition('/')[0] if by_module else path)

  def clipped(updates: PyTree, params: PyTree) -> PyTree:
    norms = tensor_norms(updates, name, by_layer=not by_module)
    return tree.map_with_path(
      lambda path, leaf: (
        leaf * jnp.minimum(1, limit / (norms[path] + _EPSILON))
      ),
      updates,
    )

  return optax.stateless(clipped)


def ratios(
  joined: tuple[str, ...], decays: Decays, coefficient: float = 1.0
) -> optax.GradientTransformation:
  """Returns a transformation that multiplies directions by trust ratios.

  The trust ratio of a tensor is c · |parameter| / |direction|, or 1 if either
  norm is 0.

  Args:
    joined: regular expressions that join leaves into one tensor, see
      `naming`.
    decays: function from parameters to a tree of booleans. Leaves with True are
      multiplied by their ratio; the others are not changed.
    coefficient: c; 1 for LAMB, .001 for LARS.

  Raises:
    UserError: a pattern is not a regular expression.

  References: You et al., arXiv 1904.00962, algorithm 2 (LAMB), and arXiv
  1708.03888, equation 6 (LARS).
  """
  name = naming('optimizer.trust_joined', joined)

  def adapted(updates: PyTree, params: PyTree) -> PyTree:
    weights, steps = tensor_norms(params, name), tensor_norms(updates, name)
    chosen = tree.flatten(decays(params))

    def scaled(path: str, leaf: Array) -> Array:
      if not chosen[path]:
        return leaf
      return leaf * _ratio(coefficient * weights[path], steps[path])

    return tree.map_with_path(scaled, updates)

  return optax.stateless(adapted)


def _ratio(
  weight: Float[Array, '...'], step: Float[Array, '...']
) -> Float[Array, '...']:
  """Returns weight / step, or 1 where either is 0."""
  defined = (weight > 0) & (step > 0)
  return jnp.where(defined, weight / jnp.where(defined, step, 1), 1.0)


# Functions of path and leaf that select the leaves with weight decay. The paper
# does not specify the leaves; 'all' is our reading of the authors' code.
# 'kernels' leaves out biases, norms, class token, position embeddings and
# everything else that is not the kernel of a matrix product. 'tensors' leaves
# out biases and all leaves that have a single axis in the code of MAE and DINO.
DECAY_MASKS = {
  'all': lambda path, leaf: True,
  'kernels': lambda path, leaf: path.rpartition('/')[2] == 'kernel',
  'tensors': lambda path, leaf: _is_tensor(path, leaf),
}


def _is_tensor(path: str, leaf: Any) -> bool:
  """Returns whether a leaf has two or more axes in most other projects.

  In contrast to those, a stacked leaf has a layer axis here, and a bias may
  have an axis for the heads.
  """
  axes = len(leaf.shape) - (sharding.STACKED in path)
  return axes > 1 and path.rpartition('/')[2] != 'bias'


class Setting(NamedTuple):
  """Properties of a run that its optimizer may use.

  Attributes:
    steps: function that converts a duration ('1 epochs') to a number of
      updates.
    layers_above: function from the path of a parameter to the number of layers
      above it; see `objectives.contract.Objective`.
  """

  steps: Callable[[str], int] = lambda duration: 0
  layers_above: rules_lib.LayersAbove = lambda path: 0


class Optimizer(NamedTuple):
  """An optax transformation that leaves some of the parameters unchanged.

  Attributes:
    init: see `optax.GradientTransformation`.
    update: see `optax.GradientTransformation`.
    table: rules, which determine the frozen parameters.
  """

  init: optax.TransformInitFn
  update: optax.TransformUpdateFn
  table: rules_lib.Rules = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
  """Config keys of clipping, weight decay and rules, for most optimizers.

  Attributes:
    clip_norm: largest norm of the gradient; None or 0 for no clipping.
    clip: 'global' to limit the norm of all gradients together, 'tensor' to
      limit the norm of each tensor in each layer, or 'module' to limit the norm
      of each module of an objective (such as `model` and `head`).
    clip_joined: regular expressions that join leaves into one tensor, or
      modules into one, for clipping; see `clipping`.
    weight_decay: decoupled weight decay, multiplied by the learning rate.
    weight_decay_end: weight decay at the end of training, reached along half a
      cosine; None for a constant weight decay.
    decay_mask: key of `DECAY_MASKS`, which selects the leaves with weight
      decay.
    layer_decay: factor d of the learning rate from layer to layer, in (0, 1].
      The rate of a parameter below n layers, of which a head is the last, is
      multiplied by dⁿ: 1 for a head, d for the last block.
    rules: further factors of learning rate and weight decay by path, and frozen
      leaves; see the module `rules`.
  """

  clip_norm: float | None = None
  clip: str = 'global'
  clip_joined: tuple[str, ...] = ()
  weight_decay: float = 0.0
  weight_decay_end: float | None = None
  decay_mask: str = 'all'
  layer_decay: float = 1.0
  rules: tuple = ()

  def chain(
    self,
    scale: optax.GradientTransformation,
    schedule: optax.Schedule,
    setting: Setting,
    adapt: Adapt | None = None,
  ) -> Optimizer:
    """Returns a chain that clips, scales, adds decay and multiplies by −lr.

    The decay is decoupled and multiplied by the learning rate: an update is
    −lr · (direction + weight_decay · parameter), times the factors of its rule
    and of its layer.

    Args:
      scale: transformation of gradients into directions.
      schedule: learning rate as a function of the update count.
      setting: properties of the run.
      adapt: function that returns a transformation to apply after weight decay
        is added, such as trust ratios. Its argument maps parameters to whether
        each of them decays.

    Raises:
      UserError: a value is outside its range, or `clip` or `decay_mask` is
        unknown.
    """
    check_range('optimizer.clip_norm', self.clip_norm, at_least=0)
    check_range('optimizer.layer_decay', self.layer_decay, above=0, at_most=1)
    steps, rules = setting.steps, rules_lib.parse(self.rules)
    # `clipping` checks its keys, so it is called even if there is no limit; its
    # result is then replaced.
    clip = clipping(self.clip_norm or math.inf, self.clip, self.clip_joined)
    if not self.clip_norm:
      clip = optax.identity()
    rate = [optax.scale_by_learning_rate(schedule)]
    if rules or self.layer_decay != 1:
      rate.append(
        rules_lib.scale_by_rates(rules, self.layer_decay, setting.layers_above)
      )
    has_delays = any(steps(rule.after) for _, rule in rules)
    if any(rule.frozen for _, rule in rules):
      clip = rules_lib.without_frozen(rules, clip)
      if not has_delays:  # with delays, `delayed` excludes frozen parameters
        scale = rules_lib.without_frozen(rules, scale)
    if has_delays:
      # Gradients of leaves do not count in the norm for clipping until
      # `Rule.after` has passed. The second gate, after the rate, removes their
      # weight decay.
      gate = rules_lib.gated(rules, lambda rule: steps(rule.after))
      clip = optax.chain(gate, clip)
      scale = rules_lib.delayed(rules, steps, scale)
      rate.append(gate)
    if any(steps(rule.lr_after) for _, rule in rules):
      rate.append(rules_lib.gated(rules, lambda rule: steps(rule.lr_after)))
    decays = self._decays(rules)
    decay = self._decay(rules, decays, steps)
    last = adapt(decays) if adapt else optax.identity()
    return Optimizer(*optax.chain(clip, scale, decay, last, *rate), rules)

  def _decays(self, rules: rules_lib.Rules) -> Decays:
    """Returns a function from parameters to whether each of them decays."""
    check_choice('optimizer.decay_mask', self.decay_mask, DECAY_MASKS)
    mask = functools.partial(tree.map_with_path, DECAY_MASKS[self.decay_mask])
    if not self.weight_decay and not self.weight_decay_end:
      return functools.partial(jax.tree.map, lambda _: False)
    return lambda params: jax.tree.map(
      lambda decays, rule: bool(decays and rule.decay),
      mask(params),
      rules_lib.match(rules, params),
    )

  def _decay(
    self, rules: rules_lib.Rules, decays: Decays, steps: Callable[[str], int]
  ) -> optax.GradientTransformation:
    """Returns the transformation that adds weight decay to directions."""
    decay, end = self.weight_decay, self.weight_decay_end
    check_range('optimizer.weight_decay', decay, at_least=0)
    check_range('optimizer.weight_decay_end', end, at_least=0)
    if end is not None:
      decay = cosine(decay, end, steps('100 %'))
    return rules_lib.add_decayed(decay, rules, decays)


def adam_directions(
  b1: float, b2: float, eps: float, moment_dtype: str = 'float32'
) -> optax.GradientTransformation:
  """Checks Adam's keys and returns Adam without a learning rate.

  Raises:
    UserError: a value is outside its range, or the dtype is unknown.
  """
  check_range('optimizer.b1', b1, at_least=0, below=1)
  check_range('optimizer.b2', b2, at_least=0, below=1)
  check_range('optimizer.eps', eps, above=0)
  check_choice('optimizer.moment_dtype', moment_dtype, ('float32', 'bfloat16'))
  return optax.scale_by_adam(b1, b2, eps, mu_dtype=jnp.dtype(moment_dtype))


@schema.keyed_by(Common)
def adam(
  schedule: optax.Schedule,
  setting: Setting = Setting(),  # noqa: B008 (immutable)
  /,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  moment_dtype: str = 'float32',
  **common: Any,
) -> Optimizer:
  """Builds Adam with decoupled weight decay (Table 3; arXiv 1711.05101).

  Args:
    schedule: learning rate as a function of the update count.
    setting: properties of the run.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: value added to the root of the second moment, above 0.
    moment_dtype: dtype of the first moment, 'float32' or 'bfloat16' (saves
      memory).
    **common: fields of `Common`.

  Raises:
    UserError: a value is outside its range, or a mask or dtype is unknown.
  """
  scale = adam_directions(b1, b2, eps, moment_dtype)
  return Common(**common).chain(scale, schedule, setting)


@schema.keyed_by(Common)
def sgd(
  schedule: optax.Schedule,
  setting: Setting = Setting(),  # noqa: B008 (immutable)
  /,
  *,
  momentum: float = 0.9,
  **common: Any,
) -> Optimizer:
  """Builds SGD with (heavy-ball) momentum, as in fine-tuning (Table 4).

  Args:
    schedule: learning rate as a function of the update count.
    setting: properties of the run.
    momentum: decay of the trace of gradients, in [0, 1).
    **common: fields of `Common`.

  Raises:
    UserError: a value is outside its range, or the mask is unknown.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  scale = optax.trace(decay=momentum)
  return Common(**common).chain(scale, schedule, setting)


@schema.keyed_by(Common)
def lamb(
  schedule: optax.Schedule,
  setting: Setting = Setting(),  # noqa: B008 (immutable)
  /,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  trust_joined: tuple[str, ...] = (),
  decay_mask: str = 'kernels',
  **common: Any,
) -> Optimizer:
  """Builds LAMB: Adam with updates proportional to the norm of each tensor.

  For each tensor with weight decay, the direction, including the decay, is
  multiplied by the trust ratio |parameter| / |direction| (1 if either is 0);
  other tensors are updated as in Adam. Each layer of a stack has its own ratio.
  The code that DeiT-III was trained with does the same; the LAMB paper (arXiv
  1904.00962, algorithm 2) adapts all tensors.

  Args:
    schedule: learning rate as a function of the update count.
    setting: properties of the run.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: value added to the root of the second moment, above 0.
    trust_joined: regular expressions that join leaves into one tensor, which
      has one ratio; see `naming`.
    decay_mask: see `Common`.
    **common: the other fields of `Common`.

  Raises:
    UserError: a value is outside its range, or the mask is unknown.
  """
  adapt = functools.partial(ratios, trust_joined)
  return Common(decay_mask=decay_mask, **common).chain(
    adam_directions(b1, b2, eps), schedule, setting, adapt
  )


def lars(
  schedule: optax.Schedule,
  setting: Setting = Setting(),  # noqa: B008 (immutable)
  /,
  *,
  momentum: float = 0.9,
  rules: tuple = (),
) -> Optimizer:
  """Builds LARS: SGD with momentum and a trust ratio for each matrix.

  The gradient of each tensor with two or more axes is multiplied by .001 ·
  |parameter| / |gradient| (1 if either is 0) before it enters the momentum;
  each layer of a stack has its own ratio. There is no weight decay. MAE uses
  LARS for linear probing with very large batches.

  Args:
    schedule: learning rate as a function of the update count.
    setting: properties of the run.
    momentum: decay of the trace of gradients, in [0, 1).
    rules: factors of the learning rate by path, and frozen leaves; see the
      module `rules`.

  Raises:
    UserError: a value is outside its range.

  Reference: You et al., arXiv 1708.03888, equation 6.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  matrices = functools.partial(tree.map_with_path, DECAY_MASKS['tensors'])
  scale = optax.chain(
    ratios((), matrices, coefficient=1e-3), optax.trace(decay=momentum)
  )
  return Common(rules=rules).chain(scale, schedule, setting)
