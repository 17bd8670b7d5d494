"""Tests of learning rates against their formulas."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.optim.schedule import make_schedule


def make(total, warmup, *, base_lr=3e-3, **keys):
  """Returns a schedule with a warm-up of some steps."""
  return make_schedule(total, lambda _: warmup, base_lr=base_lr, **keys)


@pytest.mark.parametrize('base, end', [(3e-3, 0.0), (3e-3, 1e-5), (0.0, 0.0)])
@pytest.mark.parametrize('warmup', [0, 1, 10])
@pytest.mark.parametrize('decay', ['linear', 'cosine', 'constant'])
def test_schedule_equals_its_formula(decay, warmup, base, end):
  """Every step is checked: the warm-up, the decay, the end and beyond."""
  total = 50
  schedule = make(total, warmup, base_lr=base, decay=decay, end_lr=end)
  for step in range(total + 5):
    done = min((step - warmup) / (total - warmup), 1)
    expected = {
      'linear': base + (end - base) * done,
      'cosine': end + (base - end) * (1 + np.cos(np.pi * done)) / 2,
      'constant': base,
    }[decay]
    if step < warmup:
      expected = base * step / warmup
    # atol: the end is a difference of numbers as large as the base rate
    np.testing.assert_allclose(
      schedule(step), expected, rtol=1e-5, atol=1e-6 * base
    )


@pytest.mark.parametrize(
  'warmup, decay_at', [(5, (0.3, 0.6, 0.9)), (0, (0.29,)), (0, (0.57, 0.58))]
)
def test_step_decay(warmup, decay_at):
  """BiT's rule: warm-up, then a tenth at fractions of the run.

  In floating point, 0.29 · 100 is slightly less than 29.
  """
  schedule = make(100, warmup, decay='step', decay_at=decay_at)
  for step in range(105):
    passed = sum(step >= round(100 * at) for at in decay_at)
    expected = 3e-3 * min(step / warmup if warmup else 1, 1) * 0.1**passed
    np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)


@pytest.mark.parametrize('warmup', [0, 4])
@pytest.mark.parametrize('decay', ['wsd', 'rsqrt'])
def test_cooldowns_equal_their_formulas(decay, warmup):
  """Before the cool-down, the rate does not depend on the length of the run."""
  total, base, end, start = 50, 3e-3, 1e-4, 40
  keys = dict(decay=decay, end_lr=end)
  schedule = make(total, warmup, **keys, cooldown=0.2)
  longer = make(2 * total, warmup, **keys, cooldown=0.1)
  for step in range(total + 5):
    expected = base * min(step / warmup, 1) if warmup else base
    if decay == 'rsqrt' and step > warmup:
      expected = base / np.sqrt(1 + (step - warmup) / 10_000)
    if step > start:
      progress = min((step - start) / (total - start), 1)
      expected = end + (expected - end) * (1 - progress)
    else:
      assert schedule(step) == longer(step)
    np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)


@pytest.mark.parametrize(
  'message, keys',
  [
    ('schedule.decay.*cosine', dict(decay='steps')),
    ('warm-up', dict(warmup=100)),
    ('warm-up', dict(warmup=101)),
    *(
      # The message contains both keys and their values.
      (rf'decay_at is .*{keys.get("cooldown", 0)}', keys)
      for keys in (
        dict(decay='step'),
        dict(decay='cosine', decay_at=(0.5,)),
        dict(decay='step', decay_at=(0.6, 0.3)),
        dict(decay='step', decay_at=(0.3, 0.3)),
        dict(decay='step', decay_at=(0.05, 0.5)),  # within the warm-up
        dict(decay='step', decay_at=(0.1, 0.5)),  # at its end
        dict(decay='step', decay_at=(0.5, 1.0)),
        dict(decay='wsd'),
        dict(decay='wsd', cooldown=0.95),
        dict(decay='cosine', cooldown=0.1),
        dict(decay='rsqrt', cooldown=-0.1),
      )
    ),
  ],
)
def test_wrong_schedules_are_refused(message, keys):
  with pytest.raises(UserError, match=message):
    make(100, **{'warmup': 10} | keys)
