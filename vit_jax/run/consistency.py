"""Whether all processes of a start are about to run the same."""

import fnmatch
import json
from typing import Any

import jax

from vit_jax.config import canonical
from vit_jax.config import completion as config_lib
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.run import identity

_COMMIT = 'versions: vit_jax'


def check(about: dict[str, Any], config: Config) -> None:
  """Compares what all processes of a run are about to do.

  What one machine may have for itself is left out: how data is reached and read
  (operational keys of `source` and `reader`), and a commit that is not known.

  Args:
    about: what each would write with a checkpoint.
    config: completed.

  Raises:
    UserError: on all of them, if one would do something else than the first.
  """
  if jax.process_count() == 1:
    return
  own = json.loads(json.dumps(_shared(about, config)))
  first = consensus.from_main(lambda: own)
  changes = identity.differences(first, own)
  if None in changes.get(_COMMIT, ()):  # one of them cannot know
    del changes[_COMMIT]
  where = 'on process 0', f'on process {jax.process_index()}'
  told = consensus.of_each(identity.listed(changes, *where))
  for process, text in enumerate(told):
    if text:
      raise UserError(
        f'process {process} would run something else than process 0:{text}\n'
        'Give all processes the same command, code, packages and data.'
      )


def _shared(about: dict[str, Any], config: Config) -> dict[str, Any]:
  """What has to be the same on all processes, flat."""
  own = [
    pattern
    for pattern in identity.operational(config)
    if pattern.startswith(('source.', 'reader.'))
  ]
  values = {
    key: canonical.one(key, value)
    for key, value in config_lib.flatten(config).items()
    if not any(fnmatch.fnmatchcase(key, pattern) for pattern in own)
  }
  for kind, found in about['record'].items():
    values |= {f'{kind}: {key}': value for key, value in found.items()}
  return values
