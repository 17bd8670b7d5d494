"""Restores the newest step that is intact for all processes.

Each process reads its shards of a step. Before the step is used or renamed, the
processes exchange whether they succeeded; otherwise an error on one process
would leave the others waiting.

A directory also contains the id of the run whose steps it has. Restarts do not
change the id. Every manifest contains it, so that a step that was copied from
another run is recognized.
"""

import errno
import logging
import math
import re
import uuid
from typing import Any

import jax
from etils import epath

from vit_jax.arrays import tree
from vit_jax.checkpoint import items, manifest, steps
from vit_jax.checkpoint.items import CorruptError
from vit_jax.checkpoint.manifest import Manifest
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')

PyTree = Any
FILE = 'run_id.json'


def newest(
  root: epath.Path, abstract: PyTree, run: str
) -> tuple[PyTree, int] | None:
  """Restores the newest intact step; see `Checkpointer.restore_latest`.

  Args:
    root: directory of checkpoints.
    abstract: shapes, dtypes and shardings of the state.
    run: id of the run; a step with another id is refused.
  """
  below = math.inf

  def newest_below() -> int | None:
    candidates = [step for step in steps.committed(root) if step < below]
    return max(candidates, default=None)

  while True:
    step = items.with_retries(lambda: items.on_main(newest_below), str(root))
    if step is None:
      break
    path = root / str(step)
    try:
      return _restore(path, step, abstract, run), step
    except CorruptError as error:
      log.error('checkpoint %s is damaged and moved to *.bad: %s', path, error)
      items.with_retries(
        lambda step=step: items.on_main(steps.quarantine, root, step),
        f'renaming {path}',
      )
    below = step
  names = [name for name in steps.listing(root) if steps.is_step_or_bad(name)]
  # Only a run that never had a checkpoint may start from scratch.
  if consensus.from_main(lambda: len(names)):
    raise UserError(
      f'no checkpoint in {root} is intact ({", ".join(sorted(names))}), see '
      'the log: repair one and rename it to its step, or give another --workdir'
      ' to start from step 0.'
    )
  return None


def _restore(path: epath.Path, step: int, abstract: PyTree, run: str) -> PyTree:
  """Restores one step.

  Raises:
    CorruptError: the step is damaged, at least for one process.
    UserError, StorageError: see `items.with_retries`.
  """

  def attempt() -> PyTree:
    written, state = items.on_all(_read, path, step, abstract, run)
    # The checksums are a collective on all devices, so they are computed after
    # every process has read its part.
    items.on_all(manifest.compare, manifest.leaves(state), written.leaves)
    leaf = tree.flatten(state).get('step', step)
    items.on_all(_check_step, path, step, int(jax.device_get(leaf)))
    return state

  return items.with_retries(attempt, str(path))


def _read(
  path: epath.Path, step: int, abstract: PyTree, run: str
) -> tuple[Manifest, PyTree]:
  """Reads this process's part of a step, without verifying its arrays.

  Raises:
    UserError: the step belongs to another run, another step or another model.
    Exception: the step is damaged, or cannot be read.
  """
  if not steps.listing(path):
    text = 'only the main process sees it (do all have the same file system?)'
    raise OSError(errno.ESTALE, text, str(path))
  written = manifest.read(path)
  _check_step(path, step, written.step)
  if written.run not in (None, run):
    raise UserError(
      f'{path} was written by another run (id {written.run}, seed '
      f'{written.seed}) than its directory (id {run}). Move it away; or, to '
      f'resume from it, remove {path.parent / FILE} and the other steps.'
    )
  manifest.check_leaves(path, written.leaves, abstract)
  manifest.read_about(path, written)
  restored = {
    name: items.read_arrays(path / name, item)
    for name, item in items.split(abstract).items()
  }
  return written, items.join(restored, abstract)


def _check_step(path: epath.Path, step: int, inside: int | None) -> None:
  """Checks that a directory contains the step of its name.

  Raises:
    UserError: it contains another step.
  """
  if inside not in (None, step):
    raise UserError(
      f'{path} contains step {inside}, not {step}: it was renamed or copied. '
      f'Rename it to {path.parent / str(inside)}, or move it away.'
    )


def find(root: epath.Path) -> str:
  """Returns the id of a directory's run, or a new id if it has none.

  All processes must call it, and it returns the same id on all of them.

  Args:
    root: directory of checkpoints.

  Raises:
    items.FailedError: the directory cannot be read.
  """

  def run() -> str:
    return _read_file(root) or _read_newest_step(root) or uuid.uuid4().hex

  return items.on_main(run)


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
    paths.write(root / FILE, manifest.text_with_checksum({'run': run}))
