"""Checks that the processes of a run share its workdir."""

import logging
import time
import uuid

import jax
from etils import epath

from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
# Two minutes, because clients of network file systems may keep old listings for
# one minute.
PAUSES_S = (*paths.PAUSES_S, 32.0, 64.0)


def check(workdir: epath.Path) -> None:
  """Checks that all processes see a file that the main process writes.

  All processes must call it. Their paths of the workdir may differ.

  Args:
    workdir: directory of the run.

  Raises:
    UserError: on all processes, if one of them does not see the file.
    StorageError: the file cannot be written.
  """
  if jax.process_count() == 1:
    return

  def write() -> str:
    # No client has looked for this name before.
    file = workdir / f'.vit_jax_shared_{uuid.uuid4().hex}'
    paths.save(file, 'shared')
    return file.name

  file = workdir / consensus.from_main(write)
  for pause_s in PAUSES_S:
    if file.exists():
      break
    log.warning(
      '%s, written by process 0, is not visible. Looking again in %g s.',
      file,
      pause_s,
    )
    time.sleep(pause_s)
  seen = consensus.gather_integer(file.exists())
  if jax.process_index() == 0:
    file.unlink(missing_ok=True)
  if not all(seen):
    blind = ', '.join(str(i) for i, each in enumerate(seen) if not each)
    raise UserError(
      f'process {blind} does not see what process 0 writes to the workdir '
      f'(here {workdir}): give all processes a --workdir that they share, on a '
      'network file system or gs://BUCKET/PATH.'
    )
