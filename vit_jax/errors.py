"""The ways a run ends on purpose without finishing."""

import difflib
from collections.abc import Iterable

EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 42
EXIT_DIVERGED = 43
EXIT_STUCK = 44
EXIT_PEER_LOST = 45


class UserError(Exception):
  """Something the user can mend: printed without a traceback, exit code 2.

  The message says what came, what is allowed and what to do.
  """


class StorageError(Exception):
  """The storage failed, and no config mends that: one message, exit code 1.

  The message says what is safe and where.
  """


class DivergedError(Exception):
  """Rolling back did not help: exit code 43."""


class PreemptedError(Exception):
  """A signal came and the state is saved: exit code 42."""


def closest(name: str, allowed: Iterable[str]) -> str:
  """Returns `allowed` as text, the nearest spelling to `name` first."""
  allowed = sorted(allowed)
  near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  return f'{hint}allowed: {", ".join(allowed) or "nothing"}'
