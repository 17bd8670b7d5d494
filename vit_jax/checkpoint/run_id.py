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
from vit_jax.files import atomic
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
FILE = 'run_id.json'


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

  run = agreement.on_main(existing, root) or uuid.uuid4().hex
  return consensus.from_main(lambda: run)


def _read_file(root: epath.Path) -> str | None:
  """Reads the id from its file; returns None if that is missing or damaged."""
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
  if _read_file(root) != run:
    atomic.write(root / FILE, manifest.text_with_checksum({'run': run}))
