"""Reads and writes the id of the run whose steps a directory contains.

Restarts do not change the id. Every manifest contains it, so that a step that
was copied from another run is recognized.
"""

import logging
import re
import uuid

from etils import epath

from vit_jax.checkpoint import agreement, items, manifest, steps
from vit_jax.checkpoint.items import CorruptError

log = logging.getLogger('vit_jax')
FILE = 'run_id.json'
# An id has 32 hexadecimal digits. `agreement` exchanges integers below 2^31, so
# an id is exchanged in words of 16 bits.
_WORDS = 8


def find(root: epath.Path) -> str:
  """Returns the id of a directory's run, or a new id if it has none.

  All processes must call it, and it returns the same id on all of them.

  Args:
    root: directory of checkpoints.

  Raises:
    agreement.FailedError: the directory cannot be read.
  """

  def existing(root: epath.Path) -> str | None:
    return _read_file(root) or _read_newest_step(root)

  # Only the value of the main process is used.
  run = agreement.on_main(existing, root) or uuid.uuid4().hex
  words = [int(run[4 * i : 4 * i + 4], 16) for i in range(_WORDS)]
  return ''.join(f'{agreement.from_main(word):04x}' for word in words)


def _read_file(root: epath.Path) -> str | None:
  """Reads the id from its file; None if it is missing or damaged."""
  if FILE not in steps.listing(root):
    return None
  try:
    content = items.read_json(root, FILE)
    run = manifest.verified(content, FILE).get('run', '')
  except CorruptError as error:
    log.warning('%s: %s; the id is read from the newest step.', root, error)
    return None
  return run if re.fullmatch('[0-9a-f]{32}', run) else None


def _read_newest_step(root: epath.Path) -> str | None:
  """Reads the id from the newest manifest that contains one."""
  for step in reversed(steps.committed(root)):
    try:
      run = manifest.read(root / str(step)).run
    except CorruptError:
      continue
    if run is not None:
      return run
  return None


def record(root: epath.Path, run: str) -> None:
  """Writes the id to its file; must be called before the first save.

  Args:
    root: directory of checkpoints.
    run: id of the run.
  """
  path = root / FILE
  if _read_file(root) == run:
    return
  temporary = path.with_name(f'{FILE}.new')
  temporary.write_text(manifest.text_with_checksum({'run': run}))
  temporary.replace(path)
