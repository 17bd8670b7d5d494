"""Durations against arithmetic done by hand."""

import pytest

from vit_jax.config.durations import check, to_steps
from vit_jax.errors import UserError

IMAGENET = dict(batch_size=4096, num_examples=1_281_167)


@pytest.mark.parametrize(
  'duration, steps',
  [
    ('10000 steps', 10_000),
    ('10_000 steps', 10_000),
    ('1e4 steps', 10_000),
    ('2.5e3 steps', 2_500),
    ('1 step', 1),
    ('1 epoch', 313),  # 312.79
    ('90 epochs', 28_151),  # 28150.6
    ('90epochs', 28_151),
    (' 90  epochs ', 28_151),
    ('0.5 epochs', 156),  # 156.39
    ('303e6 examples', 73_975),  # 73974.6
    ('4096 examples', 1),
  ],
)
def test_units(duration, steps):
  """Steps count themselves, epochs and examples by the batch size."""
  assert to_steps(duration, **IMAGENET) == steps


@pytest.mark.parametrize(
  'duration, steps', [('5%', 10), ('12.5 %', 25), ('100 %', 200), ('0 %', 0)]
)
def test_percent_is_of_the_total(duration, steps):
  """'%' refers to the length of the whole training."""
  assert to_steps(duration, total_steps=200, **IMAGENET) == steps


@pytest.mark.parametrize('unit', ['steps', 'epochs', 'examples', '%'])
def test_never_rounds_something_to_nothing(unit):
  """A positive duration is at least one step, and zero is zero."""
  size = dict(batch_size=10_000, num_examples=10, total_steps=10)
  assert to_steps(f'0.001 {unit}', **size) == 1
  assert to_steps(f'0 {unit}', **size) == 0


def test_epochs_and_examples_agree():
  """k epochs are k times as many examples as the data set has."""
  for epochs in (1, 7, 14, 90, 300):
    examples = epochs * IMAGENET['num_examples']
    by_epochs = to_steps(f'{epochs} epochs', **IMAGENET)
    assert by_epochs == to_steps(f'{examples} examples', **IMAGENET)


@pytest.mark.parametrize(
  'duration',
  ['', 'steps', '90', '90 weeks', '-1 steps', 'nan epochs', '1 2 steps', '%'],
)
def test_errors_name_the_units(duration):
  """What cannot be read is refused with the units there are."""
  with pytest.raises(UserError, match='steps, epochs, examples, %'):
    to_steps(duration, total_steps=10, **IMAGENET)


def test_total_cannot_be_percent():
  """The total length has nothing to be a share of."""
  with pytest.raises(UserError, match='cannot be in %'):
    to_steps('50 %', **IMAGENET)


def test_check_names_the_key():
  """Where a duration is declared, no training is needed to refuse it."""
  check('log.every', '5 %', positive=True)
  check('checkpoint.every', '0 epochs')
  with pytest.raises(UserError, match='^log.every: '):
    check('log.every', 'often')
  with pytest.raises(UserError, match="log.every is '0 %'; .* above 0"):
    check('log.every', '0 %', positive=True)
