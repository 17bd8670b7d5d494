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
import re
import time
import uuid
from typing import Any, NamedTuple

import jax
from etils import epath

from vit_jax.arrays import tree
from vit_jax.checkpoint import items, manifest, steps
from vit_jax.checkpoint.items import CorruptError, Sleep
from vit_jax.checkpoint.manifest import Manifest
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')

PyTree = Any
FILE = 'run_id.json'


class RunIdentity(NamedTuple):
  """Identity of the resuming run, compared with the manifest of a step.

  Attributes:
    run: id of the run; a step with another id is refused.
    seed: seed of the run's config; a step with another seed is used, with a
      warning.
  """

  run: str
  seed: int | None


def newest(
  root: epath.Path,
  abstract: PyTree,
  identity: RunIdentity,
  sleep: Sleep = time.sleep,
) -> tuple[PyTree, int] | None:
  """Restores the newest intact step; see `Checkpointer.restore_latest`."""
  below = None
  while (step := _newest_step(root, below, sleep)) is not None:
    path = root / str(step)
    try:
      return _restore(path, step, abstract, identity, sleep), step
    except CorruptError as error:
      log.error('checkpoint %s is damaged and moved to *.bad: %s', path, error)
      items.with_retries(
        lambda step=step: items.on_main(steps.quarantine, root, step),
        f'renaming {path}',
        sleep,
      )
    below = step
  names = [name for name in steps.listing(root) if steps.is_step_or_bad(name)]
  # Only a run that never had a checkpoint may start from scratch.
  if consensus.from_main(lambda: len(names)):
    raise UserError(
      f'no checkpoint in {root} is intact ({", ".join(sorted(names))}); the '
      'log contains the causes. Repair one and rename it to its step, or give '
      'another --workdir to start from step 0.'
    )
  return None


def _newest_step(
  root: epath.Path, below: int | None, sleep: Sleep
) -> int | None:
  """Returns the newest step below a limit, according to the main process.

  Args:
    root: directory of checkpoints.
    below: step that was tried before, as an exclusive limit; None for no limit.
    sleep: function that waits for some seconds.

  Returns:
    The step; None if there is none.
  """

  def find() -> int | None:
    candidates = steps.committed(root)
    if below is not None:
      candidates = [step for step in candidates if step < below]
    return max(candidates, default=None)

  return items.with_retries(lambda: items.on_main(find), str(root), sleep)


def _restore(
  path: epath.Path,
  step: int,
  abstract: PyTree,
  identity: RunIdentity,
  sleep: Sleep,
) -> PyTree:
  """Restores one step.

  Raises:
    CorruptError: the step is damaged, at least for one process.
    UserError, StorageError: see `items.with_retries`.
  """

  def attempt() -> PyTree:
    written, state = items.on_all(_read, path, step, abstract, identity)
    # The checksums are a collective on all devices, so they are computed after
    # every process has read its part.
    actual = manifest.leaves(state)
    items.on_all(_compare, path, step, state, actual, written)
    if written.seed not in (None, identity.seed):
      log.warning(
        '%s was written with seed %s, but the config has %s: batches and '
        'dropout from here on are those of the new seed.',
        path,
        written.seed,
        identity.seed,
      )
    return state

  return items.with_retries(attempt, str(path), sleep)


def _read(
  path: epath.Path, step: int, abstract: PyTree, identity: RunIdentity
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
  if written.step not in (None, step):
    raise _renamed(path, step, written.step)
  if written.run not in (None, identity.run):
    raise UserError(
      f'{path} was written by another run (id {written.run}, seed '
      f'{written.seed}) than its directory (id {identity.run}, seed '
      f'{identity.seed}). Move it away; or, to resume from it, remove '
      f'{path.parent / FILE} and the other steps.'
    )
  manifest.check_leaves(path, written.leaves, abstract)
  manifest.read_about(path, written)
  restored = {
    name: items.read_arrays(path / name, item)
    for name, item in items.split(abstract).items()
  }
  return written, items.join(restored, abstract)


def _compare(
  path: epath.Path,
  step: int,
  state: PyTree,
  actual: dict[str, Any],
  written: Manifest,
) -> None:
  """Compares a restored state with its manifest and its directory's name.

  Raises:
    CorruptError: a checksum differs.
    UserError: the state belongs to another step.
  """
  manifest.compare(actual, written.leaves)
  leaf = tree.flatten(state).get('step')
  if leaf is not None and int(jax.device_get(leaf)) != step:
    raise _renamed(path, step, int(jax.device_get(leaf)))


def _renamed(path: epath.Path, step: int, inside: int | None) -> UserError:
  return UserError(
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
