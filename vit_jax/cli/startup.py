"""Prepares a command before its module is imported."""

import itertools
from collections.abc import Sequence

from vit_jax.cli import help
from vit_jax.processes import interruption


def begin(command: Sequence[str]) -> None:
  """Installs the signal handler, and refuses unknown names of commands.

  It does nothing in a process that only imports the library, which was not
  started by `python -m vit_jax.COMMAND`.

  Args:
    command: `sys.orig_argv`.
  """
  pairs = itertools.pairwise(command)
  if not any(x == '-m' and y.startswith('vit_jax.') for x, y in pairs):
    return
  # Signals must be handled from the start, because importing JAX takes seconds.
  interruption.HANDLER.install()
  help.refuse_unknown(command)
