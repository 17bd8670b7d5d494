"""The ways a run ends on purpose without finishing."""

import difflib
import math
from collections.abc import Iterable

EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 42
EXIT_DIVERGED = 43
EXIT_STUCK = 44
EXIT_PEER_LOST = 45


class UserError(Exception):
  """An error that the user can fix: one message, no traceback, exit code 2.

  The message states what was given, what is allowed and what to do.
  """


class StorageError(Exception):
  """Failing storage, which no config can fix: one message, exit code 1.

  The message states which state is saved, and where.
  """


class DivergedError(Exception):
  """Rolling back did not help: exit code 43."""


class PreemptedError(Exception):
  """A signal came and the state is saved: exit code 42."""


_SHOWN_ALL, _SHOWN_NEAR = 40, 5  # names in a message


def closest(name: str, allowed: Iterable[str]) -> str:
  """Returns text about what is allowed in place of a name.

  A short list is returned whole, with the nearest spelling first. Of a long
  list, only the nearest spellings are of use.

  Args:
    name: name that the user gave.
    allowed: names that exist.
  """
  allowed = sorted(allowed)
  near = difflib.get_close_matches(name, allowed, n=_SHOWN_NEAR, cutoff=0.5)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  if len(allowed) <= _SHOWN_ALL:
    return f'{hint}allowed: {", ".join(allowed) or "nothing"}'
  # The last part of a dotted key decides when the whole is unlike any.
  last = name.rpartition('.')[2]
  parts = {each: each.rpartition('.')[2] for each in allowed}
  alike = difflib.get_close_matches(last, parts.values(), n=_SHOWN_NEAR)
  near += [each for each in allowed if parts[each] in alike]
  nearest = list(dict.fromkeys(near))[:_SHOWN_NEAR] or allowed[:_SHOWN_NEAR]
  return f'{hint}nearest of {len(allowed)}: {", ".join(nearest)}'


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
  """Checks that a value is one of several names.

  >>> check_choice('optimizer.clip', clip, ('global', 'tensor'))

  Args:
    key: as the user writes it.
    value: value to check.
    choices: names that are allowed.

  Raises:
    UserError: it is none of them; says which are allowed.
  """
  choices = list(choices)
  if value not in choices:
    raise UserError(f'{key} is {value!r}; {closest(str(value), choices)}.')


def check_range(
  key: str,
  value: float | None,
  *,
  at_least: float = -math.inf,
  above: float = -math.inf,
  at_most: float = math.inf,
  below: float = math.inf,
) -> None:
  """Checks a number where it is declared: in the constructor that takes it.

  >>> check_range('optimizer.b2', b2, at_least=0, below=1)

  Args:
    key: as the user writes it.
    value: value that must be finite and within all limits; None (for a key that
      may be None) always is.
    at_least: smallest value allowed.
    above: largest value that is too small.
    at_most: largest value allowed.
    below: smallest value that is too large.

  Raises:
    UserError: it is not; says what is allowed.
  """
  if value is None:
    return
  if at_least <= value <= at_most and above < value < below:
    return  # neither NaN nor an infinity comes here
  limits = dict(at_least=at_least, above=above, at_most=at_most, below=below)
  words = [
    f'{name.replace("_", " ")} {limit:.10g}'
    for name, limit in limits.items()
    if math.isfinite(limit)
  ]
  if value in (math.inf, -math.inf) or value != value:
    words.append('finite')
  raise UserError(f'{key} is {value}; it must be {" and ".join(words)}.')
