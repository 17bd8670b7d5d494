"""Errors that end a command deliberately, exit codes, and checks of values."""

import difflib
import importlib
import math
from collections.abc import Iterable
from typing import Any

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
  """An error of the storage: one message, exit code 1.

  The message states which state is saved, and where.
  """


class DownloadError(StorageError):
  """A server or the network failed: one message, exit code 1.

  Starting again may help.
  """


class DivergedError(Exception):
  """Training diverged, and no more rollbacks are allowed: exit code 43."""


class PreemptedError(Exception):
  """A signal arrived, and the state was saved: exit code 42."""


# A message lists all allowed names if there are at most _MAX_LISTED, otherwise
# only the nearest.
_MAX_LISTED, _NUM_NEAREST = 40, 5


def closest(name: str, allowed: Iterable[str]) -> str:
  """Returns a hint for a message about a wrong name.

  Args:
    name: name that the user gave.
    allowed: allowed names.

  Returns:
    The most similar name, followed by all allowed names, or by the nearest ones
    if there are many.
  """
  allowed = sorted(allowed)
  near = difflib.get_close_matches(name, allowed, n=_NUM_NEAREST, cutoff=0.5)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  if len(allowed) <= _MAX_LISTED:
    return f'{hint}allowed: {", ".join(allowed) or "nothing"}'
  # Then names that are similar only in the last part of their dotted key.
  last = name.rpartition('.')[2]
  parts = {key: key.rpartition('.')[2] for key in allowed}
  similar = difflib.get_close_matches(last, parts.values(), n=_NUM_NEAREST)
  near += [key for key in allowed if parts[key] in similar]
  nearest = list(dict.fromkeys(near))[:_NUM_NEAREST] or allowed[:_NUM_NEAREST]
  return f'{hint}nearest of {len(allowed)}: {", ".join(nearest)}'


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
  """Checks that a value is one of several names.

  >>> check_choice('optimizer.clip', clip, ('global', 'tensor'))

  Args:
    key: config key or flag, as the user writes it.
    value: value to check.
    choices: allowed names.

  Raises:
    UserError: the value is not one of the names.
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
  """Checks that a number is finite and within limits.

  >>> check_range('optimizer.b2', b2, at_least=0, below=1)

  Args:
    key: config key or flag, as the user writes it.
    value: number to check; None is always allowed.
    at_least: smallest allowed value.
    above: exclusive lower limit.
    at_most: largest allowed value.
    below: exclusive upper limit.

  Raises:
    UserError: the number is not finite, or not within the limits.
  """
  if value is None:
    return
  # False for NaN and for infinities, because `above` and `below` are exclusive.
  if at_least <= value <= at_most and above < value < below:
    return
  limits = dict(at_least=at_least, above=above, at_most=at_most, below=below)
  words = [
    f'{name.replace("_", " ")} {limit:.10g}'
    for name, limit in limits.items()
    if math.isfinite(limit)
  ]
  if value in (math.inf, -math.inf) or value != value:
    words.append('finite')
  raise UserError(f'{key} is {value}; it must be {" and ".join(words)}.')


def required(module: str, purpose: str, package: str = '') -> Any:
  """Imports and returns a module that is not always installed.

  Args:
    module: name of the module.
    purpose: what needs it, the start of the message.
    package: argument of `pip install`; by default the name of the module.

  Raises:
    UserError: the module cannot be imported.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise UserError(
      f'{purpose} needs {module}, which cannot be imported ({error}): pip '
      f"install '{package or module}'."
    ) from error
