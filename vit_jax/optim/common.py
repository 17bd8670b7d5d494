"""Clipping, weight decay, rules and learning rate, for all optimizers."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from vit_jax.arrays import sharding, tree
from vit_jax.errors import check_choice, check_range
from vit_jax.optim import clipping, delays
from vit_jax.optim import rules as rules_lib
from vit_jax.optim.schedule import cosine

PyTree = Any
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
Steps = Callable[[str], int]  # duration ('1 epochs') → updates
Decays = Callable[[PyTree], PyTree]  # parameters → whether each of them decays
Adapt = Callable[[Decays], optax.GradientTransformation]


def _is_tensor(path: str, leaf: Any) -> bool:
  """Returns whether a leaf has two or more axes in most other projects.

  In contrast to those, a stacked leaf has a layer axis here, and a bias may
  have an axis for the heads.
  """
  axes = len(leaf.shape) - (sharding.STACKED in path)
  return axes > 1 and path.rpartition('/')[2] != 'bias'


def _decay_mask(decay_mask: str):
  check_choice('optimizer.decay_mask', decay_mask, DECAY_MASKS)
  return functools.partial(tree.map_with_path, DECAY_MASKS[decay_mask])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
  """Config keys of clipping, weight decay and rules, for most optimizers.

  Attributes:
    clip_norm: largest norm of the gradient; None or 0 for no clipping.
    clip: 'global' to limit the norm of all gradients together, or 'tensor' to
      limit the norm of each tensor in each layer.
    clip_joined: regular expressions that join leaves into one tensor for
      clipping, see `tensors.naming`.
    weight_decay: decoupled weight decay, multiplied by the learning rate.
    weight_decay_end: weight decay at the end of training, reached along half a
      cosine; None for a constant weight decay.
    decay_mask: key of `DECAY_MASKS`, which selects the leaves with weight
      decay.
    rules: factors of learning rate and weight decay by path, and frozen leaves;
      see the module `rules`.
  """

  clip_norm: float | None = None
  clip: str = 'global'
  clip_joined: tuple[str, ...] = ()
  weight_decay: float = 0.0
  weight_decay_end: float | None = None
  decay_mask: str = 'all'
  rules: tuple = ()

  def chain(
    self,
    scale: optax.GradientTransformation,
    schedule: optax.Schedule,
    steps: Steps,
    adapt: Adapt | None = None,
  ) -> optax.GradientTransformation:
    """Returns a chain that clips, scales, adds decay and multiplies by −lr.

    The decay is decoupled and multiplied by the learning rate: an update is
    −lr · (direction + weight_decay · parameter), times the factors of its rule.

    Args:
      scale: transformation of gradients into directions.
      schedule: learning rate as a function of the update count.
      steps: function that converts a duration ('1 epochs') to updates.
      adapt: function that returns a transformation to apply after weight decay
        is added, such as trust ratios. Its argument maps parameters to whether
        each of them decays.

    Raises:
      UserError: a value is outside its range, or `clip` or `decay_mask` is
        unknown.
    """
    check_range('optimizer.clip_norm', self.clip_norm, at_least=0)
    table = rules_lib.parse(self.rules)
    clip = clipping.transformation(
      self.clip_norm or math.inf, self.clip, self.clip_joined
    )
    clip = clip if self.clip_norm else optax.identity()
    late = any(steps(rule.after) for _, rule in table)
    rate = [optax.scale_by_learning_rate(schedule)]
    if table:
      rate.append(rules_lib.scale_by(table, lambda rule: rule.lr))
    if any(rule.frozen for _, rule in table):
      # Gradients of frozen leaves do not count in the norm for clipping.
      clip = optax.chain(rules_lib.scale_by(table, lambda rule: 1.0), clip)
      scale = scale if late else rules_lib.of_moving(table, scale)
    if late:
      # The same holds for leaves until `Rule.after` has passed. The second
      # gate, after the rate, removes their weight decay.
      gate = delays.gated(table, steps)
      clip, scale = (
        optax.chain(gate, clip),
        delays.delayed(table, steps, scale),
      )
      rate.append(gate)
    last = adapt(self._decays(table)) if adapt else optax.identity()
    return optax.chain(clip, scale, self._decay(table, steps), last, *rate)

  def _decays(self, table: rules_lib.Table) -> Callable[[PyTree], PyTree]:
    """Returns a function from parameters to whether each of them decays."""
    mask = _decay_mask(self.decay_mask)
    if not self.weight_decay and not self.weight_decay_end:
      return functools.partial(jax.tree.map, lambda _: False)
    return lambda params: jax.tree.map(
      lambda decays, rule: bool(decays and rule.decay),
      mask(params),
      rules_lib.apply(table, params),
    )

  def _decay(
    self, table: rules_lib.Table, steps: Steps
  ) -> optax.GradientTransformation:
    """Returns the transformation that adds weight decay to directions."""
    mask = _decay_mask(self.decay_mask)
    decay, end = self.weight_decay, self.weight_decay_end
    check_range('optimizer.weight_decay', decay, at_least=0)
    check_range('optimizer.weight_decay_end', end, at_least=0)
    if end is not None:
      decay = cosine(decay, end, steps('100 %'))
    elif not decay:
      return optax.identity()
    return rules_lib.add_decayed(decay, table, mask)
