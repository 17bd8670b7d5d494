"""Optimizers: constructors of the config's section `optimizer`.

All but `lars` have the keys of `common.Common` in addition to their own.
"""

import functools
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.arrays import tree
from vit_jax.config import plugins
from vit_jax.errors import check_choice, check_range
from vit_jax.optim import orthogonal, trust
from vit_jax.optim.common import DECAY_MASKS, Common, Steps


def _adam(
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


@plugins.keyed_by(Common)
def adam(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  moment_dtype: str = 'float32',
  **common: Any,
) -> optax.GradientTransformation:
  """Builds Adam with decoupled weight decay (Table 3; arXiv 1711.05101).

  Args:
    schedule: learning rate as a function of the update count.
    steps: function that converts a duration ('1 epochs') to updates.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: value added to the root of the second moment, above 0.
    moment_dtype: dtype of the first moment, 'float32' or 'bfloat16' (saves
      memory).
    **common: fields of `Common`.

  Raises:
    UserError: a value is outside its range, or a mask or dtype is unknown.
  """
  scale = _adam(b1, b2, eps, moment_dtype)
  return Common(**common).chain(scale, schedule, steps)


@plugins.keyed_by(Common)
def sgd(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  momentum: float = 0.9,
  **common: Any,
) -> optax.GradientTransformation:
  """Builds SGD with (heavy-ball) momentum, as in fine-tuning (Table 4).

  Args:
    schedule: learning rate as a function of the update count.
    steps: function that converts a duration ('1 epochs') to updates.
    momentum: decay of the trace of gradients, in [0, 1).
    **common: fields of `Common`.

  Raises:
    UserError: a value is outside its range, or the mask is unknown.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  scale = optax.trace(decay=momentum)
  return Common(**common).chain(scale, schedule, steps)


@plugins.keyed_by(Common)
def lamb(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  trust_joined: tuple[str, ...] = (),
  decay_mask: str = 'kernels',
  **common: Any,
) -> optax.GradientTransformation:
  """Builds LAMB: Adam with updates proportional to the norm of each tensor.

  For each tensor with weight decay, the direction, including the decay, is
  multiplied by the trust ratio |parameter| / |direction| (1 if either is 0);
  other tensors are updated as in Adam. Each layer of a stack has its own ratio.
  The code that DeiT-III was trained with does the same; the LAMB paper (arXiv
  1904.00962, algorithm 2) adapts all tensors.

  Args:
    schedule: learning rate as a function of the update count.
    steps: function that converts a duration ('1 epochs') to updates.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: value added to the root of the second moment, above 0.
    trust_joined: regular expressions that join leaves into one tensor, which
      has one ratio; see `tensors.naming`.
    decay_mask: see `Common`.
    **common: the other fields of `Common`.

  Raises:
    UserError: a value is outside its range, or the mask is unknown.
  """
  adapt = functools.partial(trust.ratios, trust_joined)
  return Common(decay_mask=decay_mask, **common).chain(
    _adam(b1, b2, eps), schedule, steps, adapt
  )


def lars(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  momentum: float = 0.9,
  rules: tuple = (),
) -> optax.GradientTransformation:
  """Builds LARS: SGD with momentum and a trust ratio for each matrix.

  The gradient of each tensor with two or more axes is multiplied by .001 ·
  |parameter| / |gradient| (1 if either is 0) before it enters the momentum;
  each layer of a stack has its own ratio. There is no weight decay. MAE uses
  LARS for linear probing with very large batches.

  Args:
    schedule: learning rate as a function of the update count.
    steps: function that converts a duration ('1 epochs') to updates.
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
    trust.ratios((), matrices, coefficient=1e-3), optax.trace(decay=momentum)
  )
  return Common(rules=rules).chain(scale, schedule, steps)


@plugins.keyed_by(Common)
def muon(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  momentum: float = 0.95,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  decay_mask: str = 'kernels',
  **common: Any,
) -> optax.GradientTransformation:
  """Builds Muon for the matrices of the layers, and Adam for all other leaves.

  See `orthogonal.directions`.

  Args:
    schedule: learning rate as a function of the update count; learning rates
      for Adam are suitable.
    steps: function that converts a duration ('1 epochs') to updates.
    momentum: decay of the trace of gradients of the matrices, in [0, 1).
    b1: decay of Adam's first moment, in [0, 1).
    b2: decay of Adam's second moment, in [0, 1).
    eps: value added to the root of the second moment, above 0.
    decay_mask: see `Common`.
    **common: the other fields of `Common`.

  Raises:
    UserError: a value is outside its range, or the mask is unknown.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  scale = orthogonal.directions(momentum, _adam(b1, b2, eps))
  return Common(decay_mask=decay_mask, **common).chain(scale, schedule, steps)
