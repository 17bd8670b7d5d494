"""Runs the command `plan` for other commands, which do not import it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax.errors import UserError


def predict(flags: Sequence[str]) -> dict[str, Any]:
  """Returns the output of `python -m vit_jax.plan --json`.

  Args:
    flags: flags of the command: --config, its keys, and --topology.

  Raises:
    UserError: the config cannot be planned; `plan` has printed the reason.
  """
  command = [sys.executable, '-m', 'vit_jax.plan', '--json', *flags]
  process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if process.returncode:
    raise UserError(
      f'plan failed with exit code {process.returncode} (see its message '
      'above), so nothing was started.'
    )
  return json.loads(process.stdout.splitlines()[-1])
