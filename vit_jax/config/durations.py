"""Parses durations with their unit: '90 epochs', '10000 steps', '5 %'."""

import dataclasses
import functools
import re
from typing import Any

from vit_jax.errors import UserError, check_range

_UNITS = ('steps', 'epochs', 'examples', '%')
_PATTERN = re.compile(r'\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(\S*)\s*')


@functools.cache  # the loop calls this at every step
def to_steps(
  duration: str,
  *,
  batch_size: int,
  num_examples: int,
  total_steps: int | None = None,
) -> int:
  """Converts a duration to a number of optimizer updates.

  Args:
    duration: a number and one of the units steps, epochs, examples, %.
    batch_size: number of examples in a global batch.
    num_examples: number of examples in an epoch.
    total_steps: number of updates in the whole training, which '%' refers to;
      None while it is not known.

  Returns:
    The number of updates, rounded to the nearest integer; at least 1 unless the
    duration is 0.

  Raises:
    UserError: the text is not a duration, or its unit is '%' although
      `total_steps` is None.
  """
  number, unit = parse(duration)
  if unit == '%' and total_steps is None:
    raise UserError(f'{duration!r}: the total length itself cannot be in %.')
  steps = {
    'steps': number,
    'epochs': number * num_examples / batch_size,
    'examples': number / batch_size,
    '%': number / 100 * (total_steps or 0),
  }[unit]
  check_range(f'{duration!r} in steps', steps, below=2**63)
  return max(round(steps), int(number > 0))


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

  @property
  def total_steps(self) -> int:
    """Number of updates in the whole training."""
    return to_steps(
      self.total, batch_size=self.batch_size, num_examples=self.num_examples
    )

  def steps(self, duration: str) -> int:
    """Converts a duration to a number of updates of this training."""
    return to_steps(
      duration,
      batch_size=self.batch_size,
      num_examples=self.num_examples,
      total_steps=self.total_steps,
    )

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

  Constructors call it instead of `to_steps`, for which they lack the length of
  an epoch.

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
