"""Optimizers, decay masks, and the average of weights."""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from vit_jax.arrays import tree
from vit_jax.errors import UserError, check_range
from vit_jax.optim import rules as rules_lib

PyTree = Any

# Which leaves decay. 'all' is how the authors' code of the paper is read (the
# paper names none); 'kernels' leaves out biases, norms, class token, position
# embeddings and everything else that is no matrix product's kernel.
DECAY_MASKS = {'all': r'.*', 'kernels': r'.*(^|/)kernel'}


def _decay_mask(decay_mask: str):
  if decay_mask not in DECAY_MASKS:
    raise UserError(
      f'optimizer.decay_mask is {decay_mask!r}; allowed: '
      f'{", ".join(DECAY_MASKS)}.'
    )
  pattern = re.compile(DECAY_MASKS[decay_mask])
  return lambda params: tree.map_with_path(
    lambda path, _: pattern.fullmatch(path) is not None, params
  )


def _chain(
  scale: optax.GradientTransformation,
  schedule: optax.Schedule,
  clip_norm: float | None,
  weight_decay: float,
  decay_mask: str,
  table: rules_lib.Table,
) -> optax.GradientTransformation:
  """Clip, scale, add decay, then multiply all of it by −lr.

  The decay is decoupled and multiplied by the learning rate: an update is
  −lr · (direction + weight_decay · parameter), times the factors of its rule.
  """
  check_range('optimizer.clip_norm', clip_norm, at_least=0)
  check_range('optimizer.weight_decay', weight_decay, at_least=0)
  clip, mask = optax.identity(), _decay_mask(decay_mask)
  decay = optax.identity()
  if clip_norm:
    clip = optax.clip_by_global_norm(clip_norm)
  if weight_decay:
    decay = rules_lib.add_decayed(weight_decay, table, mask)
  if any(rule.frozen for _, rule in table):
    clip = optax.chain(rules_lib.scale_by(table, lambda rule: 1.0), clip)
    scale = rules_lib.of_moving(table, scale)
  rate = [optax.scale_by_learning_rate(schedule)]
  if table:
    rate.append(rules_lib.scale_by(table, lambda rule: rule.lr))
  return optax.chain(clip, scale, decay, *rate)


def adam(
  schedule: optax.Schedule,
  /,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  clip_norm: float | None = None,
  weight_decay: float = 0.0,
  decay_mask: str = 'all',
  rules: tuple = (),
  moment_dtype: str = 'float32',
) -> optax.GradientTransformation:
  """Adam with decoupled weight decay (Table 3; arXiv 1711.05101).

  Args:
    schedule: learning rate by number of updates.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: added to the root of the second moment, above 0.
    clip_norm: largest global norm of the gradient; None or 0 for no clipping.
    weight_decay: multiplied by the learning rate when applied.
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
  return _chain(
    scale,
    schedule,
    clip_norm,
    weight_decay,
    decay_mask,
    rules_lib.parse(rules),
  )


def sgd(
  schedule: optax.Schedule,
  /,
  *,
  momentum: float = 0.9,
  clip_norm: float | None = None,
  weight_decay: float = 0.0,
  decay_mask: str = 'all',
  rules: tuple = (),
) -> optax.GradientTransformation:
  """SGD with (heavy-ball) momentum, as in fine-tuning (Table 4).

  Args:
    schedule: learning rate by number of updates.
    momentum: decay of the trace of gradients, in [0, 1).
    clip_norm: largest global norm of the gradient; None or 0 for no clipping.
    weight_decay: decoupled, multiplied by the learning rate.
    decay_mask: the leaves that decay, see `DECAY_MASKS`.
    rules: factors of rate and decay by path, frozen ones, see `rules`.

  Raises:
    UserError: a value outside its range, or an unknown mask.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  scale = optax.trace(decay=momentum)
  return _chain(
    scale,
    schedule,
    clip_norm,
    weight_decay,
    decay_mask,
    rules_lib.parse(rules),
  )


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
