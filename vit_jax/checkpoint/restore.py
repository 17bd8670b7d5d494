"""Restores the newest step that is intact for all processes.

Each process reads its part of a step. Before the step is used or renamed, the
processes exchange whether they succeeded; otherwise an error on one process
would leave the others waiting.
"""

import errno
import logging
import time
from typing import Any, NamedTuple

import jax
from etils import epath

from vit_jax.arrays import tree
from vit_jax.checkpoint import agreement, items, manifest, run_id, steps
from vit_jax.checkpoint.agreement import Sleep
from vit_jax.checkpoint.items import CorruptError
from vit_jax.checkpoint.manifest import Manifest
from vit_jax.errors import UserError
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
PyTree = Any


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
      agreement.with_retries(
        lambda step=step: agreement.on_main(steps.quarantine, root, step),
        f'renaming {path}',
        sleep,
      )
    below = step
  names = [name for name in steps.listing(root) if steps.is_step_or_bad(name)]
  # Only a run that never had a checkpoint may start from scratch.
  if consensus.from_main(lambda: len(names)):
    raise UserError(
      f'no checkpoint in {root} is intact: {", ".join(sorted(names))} cannot '
      'be used; the log contains the cause for each one that was renamed '
      '(.bad). Repair one and rename it to its step, or give another --workdir '
      'to start from step 0.'
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

  found = agreement.with_retries(
    lambda: agreement.on_main(find), str(root), sleep
  )
  return consensus.from_main(lambda: found)


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
    UserError, StorageError: see `agreement.with_retries`.
  """

  def attempt() -> PyTree:
    written, state = agreement.on_all(_read, path, step, abstract, identity)
    # The checksums are a collective on all devices, so they are computed after
    # every process has read its part.
    actual = manifest.leaves(state)
    agreement.on_all(_compare, path, step, state, actual, written)
    if written.seed not in (None, identity.seed):
      log.warning(
        '%s was written with seed %s, but the config has %s: batches and '
        'dropout from here on are those of the new seed.',
        path,
        written.seed,
        identity.seed,
      )
    return state

  return agreement.with_retries(attempt, str(path), sleep)


def _read(
  path: epath.Path, step: int, abstract: PyTree, identity: RunIdentity
) -> tuple[Manifest, PyTree]:
  """Reads this process's part of a step, without verifying its arrays.

  Raises:
    UserError: the step belongs to another run, another step or another model.
    Exception: the step is damaged, or cannot be read.
  """
  if not steps.listing(path):
    raise OSError(
      errno.ESTALE,
      'the main process can see it, but this one cannot (do all processes have '
      'the same file system?)',
      str(path),
    )
  written = manifest.read(path)
  if written.step not in (None, step):
    raise _renamed(path, step, written.step)
  if written.run not in (None, identity.run):
    raise UserError(
      f'{path} was written by another run (id {written.run}, seed '
      f'{written.seed}) than the one of this directory (id {identity.run}, '
      f'seed {identity.seed}). Move it away; or, to resume from it, remove '
      f'{path.parent / run_id.FILE} and the other steps.'
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
