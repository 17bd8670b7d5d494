"""Optimizers: constructors of the config's section `optimizer`."""

import functools

import jax.numpy as jnp
import optax

from vit_jax.arrays import tree
from vit_jax.errors import check_choice, check_range
from vit_jax.optim import orthogonal, trust
from vit_jax.optim.common import DECAY_MASKS, Common, Steps


def _adam(
  b1: float, b2: float, eps: float, moment_dtype: str = 'float32'
) -> optax.GradientTransformation:
  """Adam's directions, from keys that are checked."""
  check_range('optimizer.b1', b1, at_least=0, below=1)
  check_range('optimizer.b2', b2, at_least=0, below=1)
  check_range('optimizer.eps', eps, above=0)
  check_choice('optimizer.moment_dtype', moment_dtype, ('float32', 'bfloat16'))
  return optax.scale_by_adam(b1, b2, eps, mu_dtype=jnp.dtype(moment_dtype))


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
    clip: the object of that norm: 'global', all gradients together, or
      'tensor', each tensor (and layer) by itself.
    clip_joined: leaves that are one tensor, see `clipping.by_tensor`.
    weight_decay: multiplied by the learning rate when applied.
    weight_decay_end: its value at the end of the training, after half a cosine;
      None for the same throughout.
    decay_mask: the leaves that decay, see `DECAY_MASKS`.
    rules: factors of rate and decay by path, frozen ones, see `rules`.
    moment_dtype: dtype of the first moment, 'float32' or 'bfloat16' (saves
      memory).

  Raises:
    UserError: a value outside its range, an unknown mask or dtype.
  """
  scale = _adam(b1, b2, eps, moment_dtype)
  clipping = clip_norm, clip, clip_joined
  decay = weight_decay, weight_decay_end, decay_mask
  return Common(*clipping, *decay, rules).chain(scale, schedule, steps)


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
    weight_decay_end: last value of its cosine schedule.
    decay_mask: the leaves that decay, see `DECAY_MASKS`.
    rules: factors of rate and decay by path, frozen ones, see `rules`.

  Raises:
    UserError: a value outside its range, or an unknown mask.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  scale = optax.trace(decay=momentum)
  clipping = clip_norm, clip, clip_joined
  decay = weight_decay, weight_decay_end, decay_mask
  return Common(*clipping, *decay, rules).chain(scale, schedule, steps)


def lamb(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  clip_norm: float | None = None,
  clip: str = 'global',
  clip_joined: tuple[str, ...] = (),
  weight_decay: float = 0.0,
  weight_decay_end: float | None = None,
  decay_mask: str = 'kernels',
  rules: tuple = (),
  trust_joined: tuple[str, ...] = (),
) -> optax.GradientTransformation:
  """LAMB: Adam with steps in proportion to the weights (arXiv 1904.00962).

  The direction of each tensor that decays, decay included, is multiplied by
  |parameter| / |direction| (1 where either is 0); other tensors follow Adam.
  Each layer of a stack has a ratio of its own. The code that DeiT-III was
  trained with does the same; the paper (algorithm 2) adapts all tensors.

  Args:
    schedule: learning rate by number of updates.
    steps: function that converts a duration ('1 epochs') to updates.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: value added to the root of the second moment, above 0.
    clip_norm: largest norm of the gradient; None for no clipping.
    clip: 'global' or 'tensor'.
    clip_joined: leaves that are one tensor in clipping.
    weight_decay: decoupled weight decay.
    weight_decay_end: last value of its cosine.
    decay_mask: leaves that decay, see `common.DECAY_MASKS`.
    rules: factors of rate and decay by path, and frozen leaves, see `rules`.
    trust_joined: leaves that have one ratio, see `tensors.naming`.

  Raises:
    UserError: a value is outside its range, or the mask is unknown.
  """
  clipping = clip_norm, clip, clip_joined
  decay = weight_decay, weight_decay_end, decay_mask
  adapt = functools.partial(trust.ratios, trust_joined)
  return Common(*clipping, *decay, rules).chain(
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
  """LARS: SGD with momentum and a trust ratio of each matrix.

  The gradient of each tensor of two axes or more is multiplied by .001 ·
  |parameter| / |gradient| (1 where either is 0) before it enters the momentum;
  each layer of a stack has a ratio of its own. There is no weight decay. MAE
  trains linear classifiers by it, with very large batches.

  Args:
    schedule: learning rate by number of updates.
    steps: function that converts a duration ('1 epochs') to updates.
    momentum: decay of the trace of gradients, in [0, 1).
    rules: factors of the rate by path, and frozen leaves, see `rules`.

  Raises:
    UserError: a value is outside its range.

  Reference: You et al., arXiv 1708.03888, equation 6.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  matrices = functools.partial(tree.map_with_path, DECAY_MASKS['tensors'])
  scale = optax.chain(
    trust.ratios((), matrices, coefficient=1e-3), optax.trace(decay=momentum)
  )
  common = Common(
    clip_norm=None,
    clip='global',
    clip_joined=(),
    weight_decay=0.0,
    weight_decay_end=None,
    decay_mask='tensors',
    rules=rules,
  )
  return common.chain(scale, schedule, steps)


def muon(
  schedule: optax.Schedule,
  steps: Steps = lambda duration: 0,
  /,
  *,
  momentum: float = 0.95,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  clip_norm: float | None = None,
  clip: str = 'global',
  clip_joined: tuple[str, ...] = (),
  weight_decay: float = 0.0,
  weight_decay_end: float | None = None,
  decay_mask: str = 'kernels',
  rules: tuple = (),
) -> optax.GradientTransformation:
  """Muon for the layers' matrices, Adam for all else.

  See `orthogonal.directions`.

  Args:
    schedule: learning rate by number of updates; one that suits Adam suits.
    steps: a duration of the training ('1 epochs') in updates.
    momentum: decay of the matrices' gradients, in [0, 1).
    b1: Adam's, for the other leaves, as are `b2` and `eps`.
    b2: decay of the second moment, in [0, 1).
    eps: added to the root of the second moment, above 0.
    clip_norm: as in `adam`, and so are all that follow.
    clip: 'global' or 'tensor'.
    clip_joined: leaves that are one tensor in clipping.
    weight_decay: decoupled.
    weight_decay_end: last value of its cosine schedule.
    decay_mask: the leaves that decay, see `common.DECAY_MASKS`.
    rules: factors of rate and decay by path, frozen ones, see `rules`.

  Raises:
    UserError: a value outside its range, or an unknown mask.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  clipping = clip_norm, clip, clip_joined
  decay = weight_decay, weight_decay_end, decay_mask
  scale = orthogonal.directions(momentum, _adam(b1, b2, eps))
  return Common(*clipping, *decay, rules).chain(scale, schedule, steps)
