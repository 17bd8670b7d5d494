"""Schedules of the learning rate and of other values."""

from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.errors import UserError, check_choice, check_range


def make_schedule(
  total_steps: int,
  warmup_steps: int,
  /,
  *,
  base_lr: float,
  decay: str = 'cosine',
  end_lr: float = 0.0,
  warmup: str = '0 steps',
  decay_at: tuple[float, ...] = (),
) -> optax.Schedule:
  """Returns a schedule with linear warm-up from 0, followed by a decay.

  Args:
    total_steps: number of updates in the whole run, after which `end_lr` is
      reached.
    warmup_steps: number of updates in the warm-up, after which `base_lr` is
      reached.
    base_lr: peak learning rate.
    decay: 'linear', 'cosine', 'constant' (Tables 3 and 4), or 'step' to divide
      the rate by 10 at each of `decay_at` (BiT, arXiv 1912.11370).
    end_lr: final learning rate of 'linear' and 'cosine' (1e-5 in the authors'
      linear decay).
    warmup: duration from which the caller computed `warmup_steps`, for error
      messages.
    decay_at: fractions of the run at which 'step' divides the rate, ascending;
      () for other decays.

  Raises:
    UserError: the decay is unknown, a rate is negative, the warm-up is not
      shorter than the run, or `decay_at` is invalid for this decay.
  """
  check_range('schedule.base_lr', base_lr, at_least=0)
  check_range('schedule.end_lr', end_lr, at_least=0)
  if warmup_steps >= total_steps:
    raise UserError(
      f'a warm-up of {warmup!r} ({warmup_steps} steps) does not fit a training '
      f'of {total_steps} steps: shorten schedule.warmup or lengthen total.'
    )
  _check_decay_at(decay_at, decay, warmup_steps / total_steps)
  decay_steps = total_steps - warmup_steps
  shapes = {
    'linear': optax.linear_schedule(base_lr, end_lr, decay_steps),
    'cosine': optax.cosine_decay_schedule(
      base_lr, decay_steps, end_lr / base_lr if base_lr else 0.0
    ),
    'constant': optax.constant_schedule(base_lr),
    'step': optax.piecewise_constant_schedule(
      base_lr,
      {round(at * total_steps) - warmup_steps: 0.1 for at in decay_at},
    ),
  }
  check_choice('schedule.decay', decay, shapes)
  if warmup_steps == 0:
    return shapes[decay]
  ramp = optax.linear_schedule(0.0, base_lr, warmup_steps)
  return optax.join_schedules([ramp, shapes[decay]], [warmup_steps])


def _check_decay_at(
  decay_at: tuple[float, ...], decay: str, warmup: float
) -> None:
  """Checks that `decay_at` is valid for 'step', and empty for other decays.

  Args:
    decay_at: see `make_schedule`.
    decay: see `make_schedule`.
    warmup: duration of the warm-up, as a fraction of the run.

  Raises:
    UserError: `decay_at` is not valid for this decay.
  """
  if decay == 'step':
    ascending = [*decay_at] == sorted({*decay_at})
    fits = decay_at and ascending and warmup < decay_at[0] and decay_at[-1] < 1
  else:
    fits = not decay_at
  if not fits:
    raise UserError(
      f'schedule.decay_at is {tuple(decay_at)} with schedule.decay={decay!r}: '
      "'step' needs ascending fractions of the training between the end of the "
      f'warm-up ({warmup:.3g}) and 1; other decays take none.'
    )


def cosine(start: float, end: float, total_steps: int) -> optax.Schedule:
  """Returns a schedule along half a cosine.

  Args:
    start: value at the first update.
    end: value after the last update.
    total_steps: number of updates in the whole run.
  """

  def value(count: Any) -> Float[Array, '']:
    progress = jnp.minimum(count / max(total_steps, 1), 1.0)
    return end + 0.5 * (start - end) * (1 + jnp.cos(jnp.pi * progress))

  return value
