"""Whose steps a directory holds: an id that a run keeps from start to start.

Every manifest has it, so that a step from elsewhere is not taken for the run's.
"""

import logging
import re
import uuid

from etils import epath

from vit_jax.checkpoint import agreement, items, manifest, steps
from vit_jax.checkpoint.items import CorruptError

log = logging.getLogger('vit_jax')
FILE = 'run_id.json'
_WORDS = 8  # of 16 bits each, in an id of 32 hexadecimal digits


def find(root: epath.Path) -> str:
  """The id of a directory's run, new if there is none; on all processes.

  Raises:
    agreement.FailedError: the directory cannot be read.
  """

  def known(root: epath.Path) -> str | None:
    return _recorded(root) or _of_newest(root)

  own = agreement.on_main(known, root) or uuid.uuid4().hex
  words = [int(own[4 * i : 4 * i + 4], 16) for i in range(_WORDS)]
  return ''.join(f'{agreement.from_main(word):04x}' for word in words)


def _recorded(root: epath.Path) -> str | None:
  if FILE not in steps.listing(root):
    return None
  try:
    content = items.read_json(root, FILE)
    run = manifest.unsealed(content, FILE).get('run', '')
  except CorruptError as error:
    log.warning('%s: %s; the newest step says whose it is.', root, error)
    return None
  return run if re.fullmatch('[0-9a-f]{32}', run) else None


def _of_newest(root: epath.Path) -> str | None:
  """What the newest step with an id says."""
  for step in reversed(steps.committed(root)):
    try:
      run = manifest.read(root / str(step)).run
    except CorruptError:
      continue
    if run is not None:
      return run
  return None


def record(root: epath.Path, run: str) -> None:
  """Writes the id, before the first step that has it."""
  path = root / FILE
  if _recorded(root) == run:
    return
  beside = path.with_name(f'{FILE}.new')
  beside.write_text(manifest.sealed_text({'run': run}))
  beside.replace(path)
