"""Optimizers, decay masks, and the average of weights."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError, check_range
from vit_jax.optim import clipping
from vit_jax.optim import rules as rules_lib
from vit_jax.optim.schedule import cosine

PyTree = Any

# Which leaves decay. 'all' is how the authors' code of the paper is read (the
# paper names none); 'kernels' leaves out biases, norms, class token, position
# embeddings and everything else that is no matrix product's kernel; 'tensors'
# leaves out biases and all that has one axis in other projects (MAE, DINO).
DECAY_MASKS = {
  'all': lambda path, leaf: True,
  'kernels': lambda path, leaf: path.rpartition('/')[2] == 'kernel',
  'tensors': lambda path, leaf: _is_tensor(path, leaf),
}
Steps = Callable[[str], int]


def _is_tensor(path: str, leaf: Any) -> bool:
  """Whether it has two axes or more, as most codes keep it.

  A stack of layers has one more here, and biases have those of the heads.
  """
  axes = len(leaf.shape) - (sharding.STACKED in path)
  return axes > 1 and path.rpartition('/')[2] != 'bias'


def _decay_mask(decay_mask: str):
  if decay_mask not in DECAY_MASKS:
    raise UserError(
      f'optimizer.decay_mask is {decay_mask!r}; allowed: '
      f'{", ".join(DECAY_MASKS)}.'
    )
  return functools.partial(tree.map_with_path, DECAY_MASKS[decay_mask])


@dataclasses.dataclass(frozen=True)
class _Common:
  """What all optimizers have beside their direction; see `adam`."""

  clip_norm: float | None
  clip: str
  clip_joined: tuple[str, ...]
  weight_decay: float
  weight_decay_end: float | None
  decay_mask: str
  rules: tuple

  def chain(
    self,
    scale: optax.GradientTransformation,
    schedule: optax.Schedule,
    steps: Steps,
  ) -> optax.GradientTransformation:
    """Clip, scale, add decay, then multiply all of it by −lr.

    The decay is decoupled and multiplied by the learning rate: an update is
    −lr · (direction + weight_decay · parameter), times the factors of its rule.
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
      clip = optax.chain(rules_lib.scale_by(table, lambda rule: 1.0), clip)
      scale = scale if late else rules_lib.of_moving(table, scale)
    if late:
      gate = rules_lib.gated(table, steps)
      clip, scale = (
        optax.chain(gate, clip),
        rules_lib.delayed(table, steps, scale),
      )
      rate.append(gate)
    decay = self._decay(table, steps)
    return optax.chain(clip, scale, decay, *rate)

  def _decay(
    self, table: rules_lib.Table, steps: Steps
  ) -> optax.GradientTransformation:
    """Adds what decays."""
    mask, start, end = (
      _decay_mask(self.decay_mask),
      self.weight_decay,
      self.weight_decay_end,
    )
    check_range('optimizer.weight_decay', start, at_least=0)
    check_range('optimizer.weight_decay_end', end, at_least=0)
    if end is not None:
      total = steps('100 %')
      return rules_lib.add_decayed(cosine(start, end, total), table, mask)
    if not start:
      return optax.identity()
    return rules_lib.add_decayed(start, table, mask)


def adam(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  clip_norm: float | None = None,
  clip: str = 'global',
  clip_joined: tuple[str, ...] = (),
  weight_decay: float = 0.0,
  weight_decay_end: float | None = None,
  decay_mask: str = 'all',
  rules: tuple = (),
  moment_dtype: str = 'float32',
) -> optax.GradientTransformation:
  """Adam with decoupled weight decay (Table 3; arXiv 1711.05101).

  Args:
    schedule: learning rate by number of updates.
    steps: a duration of the training ('1 epochs') in updates.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: added to the root of the second moment, above 0.
    clip_norm: largest norm of the gradient; None or 0 for no clipping.
    clip: what has that norm: 'global', all gradients together, or 'tensor',
      each tensor (and layer) by itself.
    clip_joined: leaves that are one tensor, see `clipping.by_tensor`.
    weight_decay: multiplied by the learning rate when applied.
    weight_decay_end: what it becomes over the training, by half a cosine; None
      for the same throughout.
    decay_mask: the leaves that decay, see `DECAY_MASKS`.
    rules: factors of rate and decay by path, frozen ones, see `rules`.
    moment_dtype: of the first moment, 'float32' or 'bfloat16' (saves memory).

  Raises:
    UserError: a value outside its range, an unknown mask or dtype.
  """
  check_range('optimizer.b1', b1, at_least=0, below=1)
  check_range('optimizer.b2', b2, at_least=0, below=1)
  check_range('optimizer.eps', eps, above=0)
  if moment_dtype not in ('float32', 'bfloat16'):
    raise UserError(
      f'optimizer.moment_dtype is {moment_dtype!r}; allowed: float32, bfloat16.'
    )
  scale = optax.scale_by_adam(b1, b2, eps, mu_dtype=jnp.dtype(moment_dtype))
  common = _Common(
    clip_norm,
    clip,
    clip_joined,
    weight_decay,
    weight_decay_end,
    decay_mask,
    rules,
  )
  return common.chain(scale, schedule, steps)


def sgd(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  momentum: float = 0.9,
  clip_norm: float | None = None,
  clip: str = 'global',
  clip_joined: tuple[str, ...] = (),
  weight_decay: float = 0.0,
  weight_decay_end: float | None = None,
  decay_mask: str = 'all',
  rules: tuple = (),
) -> optax.GradientTransformation:
  """SGD with (heavy-ball) momentum, as in fine-tuning (Table 4).

  Args:
    schedule: learning rate by number of updates.
    steps: a duration of the training ('1 epochs') in updates.
    momentum: decay of the trace of gradients, in [0, 1).
    clip_norm: as in `adam`, and so are all that follow.
    clip: 'global' or 'tensor'.
    clip_joined: leaves that are one tensor.
    weight_decay: decoupled, multiplied by the learning rate.
    weight_decay_end: of its cosine.
    decay_mask: the leaves that decay, see `DECAY_MASKS`.
    rules: factors of rate and decay by path, frozen ones, see `rules`.

  Raises:
    UserError: a value outside its range, or an unknown mask.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  scale = optax.trace(decay=momentum)
  common = _Common(
    clip_norm,
    clip,
    clip_joined,
    weight_decay,
    weight_decay_end,
    decay_mask,
    rules,
  )
  return common.chain(scale, schedule, steps)


class Average(NamedTuple):
  """Exponential moving average of parameters, debiased at every step.

  Attributes:
    mean: Σ d^(t−i) θ_i / Σ d^(t−i), float32, like the parameters; zero before
      the first update.
    count: updates it has seen, int32.
  """

  mean: PyTree
  count: Int[Array, '']


def average_init(params: PyTree) -> Average:
  """An average that has seen nothing."""
  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
  return Average(zeros, jnp.zeros((), jnp.int32))


def average_update(average: Average, params: PyTree, decay: float) -> Average:
  """Takes in the parameters after one update.

  The newest parameters weigh (1 − d) / (1 − d^t), so the weights sum to 1 from
  the first update on: an average of .9999 that started from fixed weights would
  hold 95 % of them after 500 updates.

  Reference: Polyak averaging in the paper's Table 2; the bias correction is
  that of Adam, arXiv 1412.6980, section 3.
  """
  count = average.count + 1
  share = (1 - decay) / -jnp.expm1(count * math.log(decay))
  mean = jax.tree.map(lambda m, p: m + share * (p - m), average.mean, params)
  return Average(mean, count)
