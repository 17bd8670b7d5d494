"""Prepares a command before its module is imported."""

import itertools
from collections.abc import Sequence

from vit_jax.cli import help
from vit_jax.processes import interruption


def begin(command: Sequence[str]) -> None:
  """Handles signals and refuses unknown names if a process runs a command.

  It does nothing in a process that imports the library.

  Args:
    command: `sys.orig_argv`.
  """
  words = itertools.pairwise(command)
  if not any(a == '-m' and b.startswith('vit_jax.') for a, b in words):
    return
  # Signals must be handled from the start, because importing JAX takes seconds.
  interruption.HANDLER.install()
  help.refuse_unknown(command)
