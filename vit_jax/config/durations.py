"""Parses durations with their unit: '90 epochs', '10000 steps', '5 %'."""

import dataclasses
import functools
import re
from typing import Any

from vit_jax.errors import UserError, check_range

_UNITS = ('steps', 'epochs', 'examples', '%')
_PATTERN = re.compile(r'\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(\S*)\s*')


@dataclasses.dataclass(frozen=True)
class Length:
  """Length of a training, with which durations are converted to updates.

  Attributes:
    total: duration of the whole training.
    batch_size: number of examples in a global batch.
    num_examples: number of examples in an epoch.
  """

  total: str
  batch_size: int
  num_examples: int

  @classmethod
  def of(cls, config: Any) -> 'Length':
    """Returns the length that a config, or a config as a dict, specifies."""
    examples = config['train']['num_examples']
    return cls(config['total'], config['batch_size'], examples)

  @functools.cached_property
  def total_steps(self) -> int:
    """Number of updates in the whole training."""
    if parse(self.total)[1] == '%':
      raise UserError(
        f'{self.total!r}: the total length itself cannot be in %.'
      )
    return self.steps(self.total)

  def steps(self, duration: str) -> int:
    """Converts a duration to a number of updates of this training.

    Args:
      duration: a number and one of the units steps, epochs, examples, %.

    Returns:
      The number of updates, rounded to the nearest integer; at least 1 unless
      the duration is 0.

    Raises:
      UserError: the text is not a duration.
    """
    number, unit = parse(duration)
    if unit == '%':
      steps = number / 100 * self.total_steps
    else:
      steps = {
        'steps': number,
        'epochs': number * self.num_examples / self.batch_size,
        'examples': number / self.batch_size,
      }[unit]
    check_range(f'{duration!r} in steps', steps, below=2**63)
    return max(round(steps), int(number > 0))

  def epoch(self, step: int) -> float:
    """Returns the number of epochs in a number of updates."""
    return step / (self.num_examples / self.batch_size)


def parse(duration: str) -> tuple[float, str]:
  """Returns the number and the unit, in the plural, of a duration.

  Raises:
    UserError: the number is missing, or the unit is missing or unknown.
  """
  match = _PATTERN.fullmatch(duration)
  for unit in _UNITS:
    if match and match[2] in (unit, unit.removesuffix('s')):
      return float(match[1].replace('_', '')), unit
  raise UserError(
    f'{duration!r} is not a duration: write a number and one of '
    f"{', '.join(_UNITS)}, for example '90 epochs'."
  )


def check(key: str, duration: str, *, positive: bool = False) -> None:
  """Checks the value of a key that is a duration.

  Constructors call it instead of `Length.steps`, because they lack the length
  of an epoch.

  Args:
    key: key, as the user writes it.
    duration: value of the key.
    positive: whether 0 is refused.

  Raises:
    UserError: the value is not a duration, or is 0 although `positive` is set.
      The message contains the key.
  """
  try:
    number, _ = parse(duration)
  except UserError as error:
    raise UserError(f'{key}: {error}') from error
  if positive:
    check_range(f'{key} ({duration!r})', number, above=0)
