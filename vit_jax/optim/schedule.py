"""The learning rate, and other values, by number of updates."""

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
) -> optax.Schedule:
  """Linear warm-up from 0 to `base_lr`, then decay to `end_lr` at the end.

  Args:
    total_steps: updates in the whole training; `end_lr` is reached there.
    warmup_steps: updates of warm-up; `base_lr` is reached after them.
    base_lr: the peak.
    decay: 'linear', 'cosine' or 'constant' (Tables 3 and 4).
    end_lr: the last value (1e-5 in the authors' linear decay).
    warmup: duration that the caller turned into `warmup_steps`.

  Raises:
    UserError: unknown decay, a negative rate, or a warm-up longer than the
      training.
  """
  check_range('schedule.base_lr', base_lr, at_least=0)
  check_range('schedule.end_lr', end_lr, at_least=0)
  if warmup_steps >= total_steps:
    raise UserError(
      f'a warm-up of {warmup!r} ({warmup_steps} steps) does not fit a training '
      f'of {total_steps} steps: shorten schedule.warmup or lengthen total.'
    )
  decay_steps = total_steps - warmup_steps
  shapes = {
    'linear': optax.linear_schedule(base_lr, end_lr, decay_steps),
    'cosine': optax.cosine_decay_schedule(
      base_lr, decay_steps, end_lr / base_lr if base_lr else 0.0
    ),
    'constant': optax.constant_schedule(base_lr),
  }
  check_choice('schedule.decay', decay, shapes)
  if warmup_steps == 0:
    return shapes[decay]
  ramp = optax.linear_schedule(0.0, base_lr, warmup_steps)
  return optax.join_schedules([ramp, shapes[decay]], [warmup_steps])


def cosine(start: float, end: float, total_steps: int) -> optax.Schedule:
  """Half a cosine from one value at the first update to another at the end."""

  def value(count: Any) -> Float[Array, '']:
    done = jnp.minimum(count / max(total_steps, 1), 1.0)
    return end + 0.5 * (start - end) * (1 + jnp.cos(jnp.pi * done))

  return value
