"""Checks that all processes of a run have the same config, data and code."""

import fnmatch
import json
from typing import Any

import jax

from vit_jax.config import completion as config_lib
from vit_jax.config import identity
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.run import comparison

_COMMIT = 'versions: vit_jax'


def check(about: dict[str, Any], config: Config) -> None:
  """Compares config, data, settings and versions of all processes of a run.

  Two things may differ between machines and are not compared: how data are
  accessed (operational keys of `source` and `reader`), and the commit of
  vit_jax if it is unknown on a process.

  Args:
    about: item `about` that this process would write with a checkpoint.
    config: completed config.

  Raises:
    UserError: on all processes, if one of them differs from process 0.
  """
  if jax.process_count() == 1:
    return
  # Converted to JSON and back, like the values received from process 0.
  local = json.loads(json.dumps(_common_values(about, config)))
  main = consensus.from_main(lambda: local)
  changes = identity.differences(main, local)
  if None in changes.get(_COMMIT, ()):  # the commit is unknown to one of them
    del changes[_COMMIT]
  differences = comparison.format_changes(
    changes, 'on process 0', f'on process {jax.process_index()}'
  )
  for process, text in enumerate(consensus.gather_text(differences)):
    if text:
      raise UserError(
        f'process {process} differs from process 0:{text}\n'
        'Give all processes the same command, code, packages and data.'
      )


def _common_values(about: dict[str, Any], config: Config) -> dict[str, Any]:
  """Returns a flat dict of the values that must agree on all processes."""
  machine_specific = [
    pattern
    for pattern in identity.operational(config)
    if pattern.startswith(('source.', 'reader.'))
  ]
  values = {
    key: identity.canonical_value(key, value)
    for key, value in config_lib.flatten(config).items()
    if not any(
      fnmatch.fnmatchcase(key, pattern) for pattern in machine_specific
    )
  }
  for kind, found in about['record'].items():
    values |= {f'{kind}: {key}': value for key, value in found.items()}
  return values
