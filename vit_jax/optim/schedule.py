"""Schedules of learning rate and weight decay."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.errors import UserError, check_choice, check_range

_TIMESCALE = 10_000  # number of updates, for 'rsqrt'


def make_schedule(
  total_steps: int,
  steps: Callable[[str], int],
  /,
  *,
  base_lr: float,
  decay: str = 'cosine',
  end_lr: float = 0.0,
  warmup: str = '0 steps',
  decay_at: tuple[float, ...] = (),
  cooldown: float = 0.0,
) -> optax.Schedule:
  """Returns a schedule with linear warm-up from 0, followed by a decay.

  Up to its cool-down, 'wsd' (warm-up, stable, decay) equals 'constant', and
  neither it nor 'rsqrt' depends on the length of the run. So one long run can
  be branched at several steps, each branch with a cool-down of its own.

  Args:
    total_steps: number of updates in the whole run.
    steps: function that converts a duration ('1 epochs') to updates.
    base_lr: peak learning rate.
    decay: 'linear', 'cosine', 'constant' (Tables 3 and 4); 'step' to divide the
      rate by 10 at each of `decay_at` (BiT, arXiv 1912.11370); 'rsqrt' for
      `base_lr` · √(10,000 / (10,000 + t)), t updates after the warm-up
      (section 3.5 of arXiv 2106.04560); 'wsd' for `base_lr` up to the
      cool-down (arXiv 2404.06395).
    end_lr: final learning rate of 'linear', 'cosine' and cool-downs (1e-5 in
      the authors' linear decay).
    warmup: duration of the warm-up, after which `base_lr` is reached.
    decay_at: fractions of the run at which 'step' divides the rate, ascending;
      () for other decays.
    cooldown: fraction of the run at its end in which the difference of 'wsd'
      and 'rsqrt' to `end_lr` is multiplied by a factor that falls linearly from
      1 to 0; 0 for none.

  Raises:
    UserError: the decay is unknown, a rate is negative, the warm-up is not
      shorter than the run, or `decay_at` or `cooldown` is invalid for this
      decay.
  """
  check_range('schedule.base_lr', base_lr, at_least=0)
  check_range('schedule.end_lr', end_lr, at_least=0)
  warmup_steps = steps(warmup)
  if warmup_steps >= total_steps:
    raise UserError(
      f'a warm-up of {warmup!r} ({warmup_steps} steps) does not fit a training '
      f'of {total_steps} steps: shorten schedule.warmup or lengthen total.'
    )
  _check_fractions(decay, decay_at, cooldown, warmup_steps / total_steps)
  cooldown_steps = round(cooldown * total_steps)
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
    'rsqrt': lambda t: base_lr * jnp.sqrt(_TIMESCALE / (_TIMESCALE + t)),
    'wsd': optax.constant_schedule(base_lr),
  }
  check_choice('schedule.decay', decay, shapes)
  schedule = shapes[decay]
  if warmup_steps:
    ramp = optax.linear_schedule(0.0, base_lr, warmup_steps)
    schedule = optax.join_schedules([ramp, schedule], [warmup_steps])
  if not cooldown_steps:
    return schedule
  start = total_steps - cooldown_steps

  def with_cooldown(step: Any) -> Float[Array, '']:
    progress = jnp.clip((step - start) / cooldown_steps, 0.0, 1.0)
    rate = schedule(step)
    cooled = end_lr + (rate - end_lr) * (1 - progress)
    return jnp.where(step > start, cooled, rate)

  return with_cooldown


def _check_fractions(
  decay: str, decay_at: tuple[float, ...], cooldown: float, warmup: float
) -> None:
  """Checks that the decay takes `decay_at` and `cooldown`, and that they fit.

  Args:
    decay: see `make_schedule`.
    decay_at: see `make_schedule`.
    cooldown: see `make_schedule`.
    warmup: duration of the warm-up, as a fraction of the run.

  Raises:
    UserError: a value is missing, not possible for this decay, or too long.
  """
  if decay == 'step':
    limits = [warmup, *decay_at, 1]
    is_ascending = all(low < high for low, high in itertools.pairwise(limits))
    decay_at_fits = len(decay_at) > 0 and is_ascending
  else:
    decay_at_fits = len(decay_at) == 0
  if decay == 'wsd':
    cooldown_fits = 0 < cooldown <= 1 - warmup
  elif decay == 'rsqrt':
    cooldown_fits = 0 <= cooldown <= 1 - warmup
  else:
    cooldown_fits = cooldown == 0
  if not (decay_at_fits and cooldown_fits):
    raise UserError(
      f'schedule.decay_at is {tuple(decay_at)} and schedule.cooldown is '
      f"{cooldown} with schedule.decay={decay!r}: 'step' needs decay_at, "
      f'ascending fractions of the training above {warmup:.3g} (the warm-up), '
      "'wsd' needs a cooldown, a fraction that begins after the warm-up, "
      "'rsqrt' may have one, and other decays take neither."
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
