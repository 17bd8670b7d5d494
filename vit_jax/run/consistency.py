"""Checks that all processes of a run are about to run the same."""

import fnmatch
import json
from typing import Any

import jax

from vit_jax.config import canonical, identity
from vit_jax.config import completion as config_lib
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.run import comparison

_COMMIT = 'versions: vit_jax'


def check(about: dict[str, Any], config: Config) -> None:
  """Compares what all processes of a run are about to do.

  What may differ between machines is left out: how data are reached and read
  (operational keys of `source` and `reader`), and an unknown commit.

  Args:
    about: item `about` that this process would write with a checkpoint.
    config: completed config.

  Raises:
    UserError: on all processes, if one of them would run something else than
      process 0.
  """
  if jax.process_count() == 1:
    return
  # As JSON, because the values of process 0 arrive as JSON.
  own = json.loads(json.dumps(_common_values(about, config)))
  first = consensus.from_main(lambda: own)
  changes = identity.differences(first, own)
  if None in changes.get(_COMMIT, ()):  # one of them cannot know its commit
    del changes[_COMMIT]
  where = 'on process 0', f'on process {jax.process_index()}'
  texts = consensus.of_each(comparison.listed(changes, *where))
  for process, text in enumerate(texts):
    if text:
      raise UserError(
        f'process {process} would run something else than process 0:{text}\n'
        'Give all processes the same command, code, packages and data.'
      )


def _common_values(about: dict[str, Any], config: Config) -> dict[str, Any]:
  """Returns the values that must be the same on all processes, flat."""
  local = [
    pattern
    for pattern in identity.operational(config)
    if pattern.startswith(('source.', 'reader.'))
  ]
  values = {
    key: canonical.one(key, value)
    for key, value in config_lib.flatten(config).items()
    if not any(fnmatch.fnmatchcase(key, pattern) for pattern in local)
  }
  for kind, found in about['record'].items():
    values |= {f'{kind}: {key}': value for key, value in found.items()}
  return values
