"""The id of the run whose steps a directory holds, kept over restarts.

Every manifest contains it, so that a step that was copied from another run is
recognized.
"""

import logging
import re
import uuid

from etils import epath

from vit_jax.checkpoint import agreement, items, manifest, steps
from vit_jax.checkpoint.items import CorruptError

log = logging.getLogger('vit_jax')
FILE = 'run_id.json'
# An id has 32 hexadecimal digits. Processes exchange it in words of 16 bits,
# because they exchange integers below 2^31.
_WORDS = 8


def find(root: epath.Path) -> str:
  """Returns the id of a directory's run, a new one if it has none.

  All processes must call it; all of them get the same id.

  Args:
    root: directory of checkpoints.

  Raises:
    agreement.FailedError: the directory cannot be read.
  """

  def known(root: epath.Path) -> str | None:
    return _recorded(root) or _of_newest(root)

  own = agreement.on_main(known, root) or uuid.uuid4().hex
  words = [int(own[4 * i : 4 * i + 4], 16) for i in range(_WORDS)]
  return ''.join(f'{agreement.from_main(word):04x}' for word in words)


def _recorded(root: epath.Path) -> str | None:
  """Reads the id from its file; None if it is missing or damaged."""
  if FILE not in steps.listing(root):
    return None
  try:
    content = items.read_json(root, FILE)
    run = manifest.unsealed(content, FILE).get('run', '')
  except CorruptError as error:
    log.warning('%s: %s; the id is read from the newest step.', root, error)
    return None
  return run if re.fullmatch('[0-9a-f]{32}', run) else None


def _of_newest(root: epath.Path) -> str | None:
  """Reads the id from the manifest of the newest step that has one."""
  for step in reversed(steps.committed(root)):
    try:
      run = manifest.read(root / str(step)).run
    except CorruptError:
      continue
    if run is not None:
      return run
  return None


def record(root: epath.Path, run: str) -> None:
  """Writes the id; must precede the first step that contains it.

  Args:
    root: directory of checkpoints.
    run: the id.
  """
  path = root / FILE
  if _recorded(root) == run:
    return
  temporary = path.with_name(f'{FILE}.new')
  temporary.write_text(manifest.sealed_text({'run': run}))
  temporary.replace(path)
