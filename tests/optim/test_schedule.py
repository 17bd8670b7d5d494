"""Tests of learning rates against their formulas."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.optim.schedule import make_schedule


def lasting(steps):
  """Returns the conversion of durations to numbers of updates."""
  return lambda duration: steps


@pytest.mark.parametrize('warmup', [0, 1, 10])
@pytest.mark.parametrize('end', [0.0, 1e-5])
@pytest.mark.parametrize('decay', ['linear', 'cosine', 'constant'])
def test_schedule_equals_its_formula(decay, end, warmup):
  """Every step is checked: the warm-up, the decay, the end and beyond."""
  total, base = 50, 3e-3
  schedule = make_schedule(
    total, lasting(warmup), base_lr=base, decay=decay, end_lr=end
  )
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


@pytest.mark.parametrize('decay', ['linear', 'cosine', 'constant'])
def test_a_rate_of_zero_stays_zero(decay):
  """The end of the cosine is not divided by the base rate of zero."""
  schedule = make_schedule(10, lasting(2), base_lr=0.0, decay=decay)
  assert [float(schedule(step)) for step in range(12)] == [0.0] * 12


def test_messages_of_wrong_schedules():
  """The decay is unknown, or the warm-up is longer than the training."""
  with pytest.raises(UserError, match='schedule.decay.*cosine'):
    make_schedule(10, lasting(0), base_lr=1.0, decay='steps')
  for warmup in (10, 11):
    with pytest.raises(UserError, match='warm-up'):
      make_schedule(10, lasting(warmup), base_lr=1.0)


def test_step_decay():
  """BiT's rule for medium data sets: warm-up, then a tenth at 30, 60, 90 %."""
  schedule = make_schedule(
    100, lasting(5), base_lr=0.003, decay='step', decay_at=(0.3, 0.6, 0.9)
  )
  for step in range(105):
    passed = sum(step >= at for at in (30, 60, 90))
    expected = 0.003 * min(step / 5, 1) * 0.1**passed
    np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)


@pytest.mark.parametrize('at', [0.29, 0.57, 0.58])
def test_fractions_of_the_run_are_rounded(at):
  """In floating point, 0.29 · 100 is slightly less than 29."""
  schedule = make_schedule(
    100, lasting(0), base_lr=1.0, decay='step', decay_at=(at,)
  )
  rates = [float(schedule(step)) for step in range(100)]
  assert rates.index(pytest.approx(0.1)) == round(100 * at)


@pytest.mark.parametrize('warmup', [0, 4])
@pytest.mark.parametrize('decay', ['wsd', 'rsqrt'])
def test_cooldowns_equal_their_formulas(decay, warmup):
  """Before the cool-down, the rate does not depend on the length of the run."""
  total, base, end, start = 50, 3e-3, 1e-4, 40
  keys = dict(base_lr=base, decay=decay, end_lr=end)
  schedule = make_schedule(total, lasting(warmup), **keys, cooldown=0.2)
  longer = make_schedule(2 * total, lasting(warmup), **keys, cooldown=0.1)
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
  'keys',
  [
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
  ],
)
def test_wrong_fractions_of_the_run(keys):
  """The message contains both keys and their values."""
  values = rf'decay_at is .*{keys.get("cooldown", 0)}'
  with pytest.raises(UserError, match=values):
    make_schedule(100, lasting(10), base_lr=1.0, **keys)
