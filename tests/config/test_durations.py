"""Tests of durations, against arithmetic done by hand."""

import pytest

from vit_jax.config.durations import Length, check
from vit_jax.errors import UserError

IMAGENET = dict(batch_size=4096, num_examples=1_281_167)
LENGTH = Length('200 steps', **IMAGENET)


@pytest.mark.parametrize(
  'duration, steps',
  [
    ('10000 steps', 10_000),
    ('1e4 steps', 10_000),
    ('1 step', 1),
    ('90 epochs', 28_151),  # 28150.6
    ('90epochs', 28_151),
    ('0.5 epochs', 156),  # 156.39
    ('303e6 examples', 73_975),  # 73974.6
    ('4096 examples', 1),
  ],
)
def test_steps_of_each_unit(duration, steps):
  """Epochs and examples are divided by the batch size."""
  assert LENGTH.steps(duration) == steps
  assert Length(duration, **IMAGENET).total_steps == steps


@pytest.mark.parametrize('unit', ['steps', 'epochs', 'examples', '%'])
def test_a_positive_duration_is_at_least_one_step(unit):
  """Zero is zero steps."""
  length = Length('10 steps', batch_size=10_000, num_examples=10)
  assert length.steps(f'0.001 {unit}') == 1
  assert length.steps(f'0 {unit}') == 0


def test_percent_is_a_fraction_of_the_total():
  """The total itself cannot be a percentage."""
  for duration, steps in (('5%', 10), ('12.5 %', 25), ('100 %', 200)):
    assert LENGTH.steps(duration) == steps
  with pytest.raises(UserError, match='cannot be in %'):
    _ = Length('50 %', **IMAGENET).total_steps


def test_check_raises_without_a_training():
  """A wrong duration is refused where it is declared."""
  check('log.every', '5 %', positive=True)
  check('checkpoint.every', '0 epochs')
  with pytest.raises(UserError, match="log.every .*'0 %'.* above 0"):
    check('log.every', '0 %', positive=True)
  for wrong in ('', 'steps', '90', '90 weeks', '-1 steps', '1 2 steps'):
    units = '^log.every: .*steps, epochs, examples, %'
    with pytest.raises(UserError, match=units):
      check('log.every', wrong)
