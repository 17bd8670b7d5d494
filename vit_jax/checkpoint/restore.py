"""Restores the newest intact step, agreed on by all processes.

Each process reads its part of a step. All of them compare how it went before
the step is used or renamed: an error on only one process would leave the others
waiting.
"""

import dataclasses
import errno
import logging
import time
from typing import Any

import jax
from etils import epath

from vit_jax.arrays import tree
from vit_jax.checkpoint import agreement, items, manifest, run_id, steps
from vit_jax.checkpoint.agreement import Sleep
from vit_jax.checkpoint.items import CorruptError
from vit_jax.checkpoint.manifest import Manifest
from vit_jax.errors import UserError

log = logging.getLogger('vit_jax')
PyTree = Any
_NONE = -1  # stands for None where processes exchange integers


@dataclasses.dataclass(frozen=True)
class Whose:
  """The run that resumes.

  Attributes:
    run: id of the run; a step with another id is refused.
    seed: seed of its config; a step with another seed is used and logged.
  """

  run: str
  seed: int | None


def newest(
  root: epath.Path, abstract: PyTree, whose: Whose, sleep: Sleep = time.sleep
) -> tuple[PyTree, int] | None:
  """Restores the newest intact step; see `Checkpointer.restore_latest`."""
  below = None
  while (step := _newest_step(root, below, sleep)) != _NONE:
    path = root / str(step)
    try:
      return _restore(path, step, abstract, whose, sleep), step
    except CorruptError as error:
      log.error('checkpoint %s is damaged and moved to *.bad: %s', path, error)
      agreement.with_retries(
        lambda step=step: agreement.on_main(steps.set_aside, root, step),
        f'renaming {path}',
        sleep,
      )
    below = step
  names = [name for name in steps.listing(root) if steps.was_step(name)]
  if agreement.from_main(len(names)):
    raise UserError(
      f'no checkpoint in {root} is whole: it holds '
      f'{", ".join(sorted(names))}, of which none can be used; the log has '
      'the causes of those that were renamed (.bad). Repair one and rename it '
      'to its step, or give another --workdir to start from step 0.'
    )
  return None


def _newest_step(root: epath.Path, below: int | None, sleep: Sleep) -> int:
  """Returns the newest step below another one, as the main process sees it.

  Args:
    root: directory of checkpoints.
    below: step that was tried before; None for none.
    sleep: function that waits for some seconds.

  Returns:
    The step, or _NONE.
  """

  def look(root: epath.Path) -> int:
    found = steps.committed(root)
    return max((s for s in found if below is None or s < below), default=_NONE)

  found = agreement.with_retries(
    lambda: agreement.on_main(look, root), str(root), sleep
  )
  return agreement.from_main(_NONE if found is None else found)


def _restore(
  path: epath.Path, step: int, abstract: PyTree, whose: Whose, sleep: Sleep
) -> PyTree:
  """Restores one step.

  Raises:
    CorruptError: it is damaged, at least for one process.
    UserError, StorageError: see `agreement.with_retries`.
  """

  def attempt() -> PyTree:
    written, state = agreement.together(_read, path, step, abstract, whose)
    # A collective on all devices: every process has read its part by now.
    actual = manifest.leaves(state)
    agreement.together(_compare, path, step, state, actual, written)
    if written.seed is not None and written.seed != whose.seed:
      log.warning(
        '%s was written with seed %s, but the config has %s: batches and '
        'dropout from here on are those of the new seed.',
        path,
        written.seed,
        whose.seed,
      )
    return state

  return agreement.with_retries(attempt, str(path), sleep)


def _read(
  path: epath.Path, step: int, abstract: PyTree, whose: Whose
) -> tuple[Manifest, PyTree]:
  """Reads this process's part of a step; its arrays are not verified yet.

  Raises:
    UserError: it belongs to another run, another step or another model.
    Exception: it is damaged, or cannot be read.
  """
  if not steps.listing(path):
    raise OSError(
      errno.ESTALE,
      'it exists for the main process but not for this one (do all processes '
      'have the same file system?)',
      str(path),
    )
  written = manifest.read(path)
  if written.step not in (None, step):
    raise _renamed(path, step, written.step)
  if written.run not in (None, whose.run):
    raise UserError(
      f'{path} was written by another run (id {written.run}, seed '
      f'{written.seed}) than that of this directory (id {whose.run}, seed '
      f'{whose.seed}). Move it away; or, to go on from it, remove '
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
  """Compares a restored state with its manifest and its directory's name."""
  manifest.compare(actual, written.leaves)
  leaf = tree.flatten(state).get('step')
  if leaf is not None and int(jax.device_get(leaf)) != step:
    raise _renamed(path, step, int(jax.device_get(leaf)))


def _renamed(path: epath.Path, step: int, inside: int | None) -> UserError:
  return UserError(
    f'{path} holds step {inside}, not {step}: it was renamed or copied. '
    f'Rename it to {path.parent / str(inside)}, or move it away.'
  )
