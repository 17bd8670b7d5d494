"""Restores the newest whole step, as all processes agree on it.

Each process reads a step, and all of them judge it together before it is used
or set aside: an error on one alone would leave the others waiting.
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
_NONE = -1


@dataclasses.dataclass(frozen=True)
class Whose:
  """The run that wants to go on.

  Attributes:
    run: its id; a step with another is refused.
    seed: of its config; a step with another is said and used.
  """

  run: str
  seed: int | None


def newest(
  root: epath.Path, abstract: PyTree, whose: Whose, sleep: Sleep = time.sleep
) -> tuple[PyTree, int] | None:
  """The newest step that is whole; see `Checkpointer.restore_latest`."""
  below = None
  while (step := _newest_step(root, below, sleep)) != _NONE:
    path = root / str(step)
    try:
      return _restore(path, step, abstract, whose, sleep), step
    except CorruptError as error:
      log.error('checkpoint %s is set aside: %s', path, error)
      agreement.persistently(
        lambda step=step: agreement.on_main(steps.set_aside, root, step),
        f'setting {path} aside',
        sleep,
      )
    below = step
  names = [name for name in steps.listing(root) if steps.was_step(name)]
  if agreement.from_main(len(names)):
    raise UserError(
      f'no checkpoint in {root} is whole: it holds '
      f'{", ".join(sorted(names))}, of which none can be used; the log has '
      'the causes of those set aside (.bad). Mend one and rename it to its '
      'step, or take another --workdir to start anew.'
    )
  return None


def _newest_step(root: epath.Path, below: int | None, sleep: Sleep) -> int:
  def look(root: epath.Path) -> int:
    found = steps.committed(root)
    return max((s for s in found if below is None or s < below), default=_NONE)

  found = agreement.persistently(
    lambda: agreement.on_main(look, root), str(root), sleep
  )
  return agreement.from_main(_NONE if found is None else found)


def _restore(
  path: epath.Path, step: int, abstract: PyTree, whose: Whose, sleep: Sleep
) -> PyTree:
  """One step's state.

  Raises:
    CorruptError: it is damaged, for one process at least.
    UserError, StorageError: see `agreement.persistently`.
  """

  def attempt() -> PyTree:
    written, state = agreement.together(_read, path, step, abstract, whose)
    now = manifest.leaves(state)  # on all devices
    agreement.together(_compare, path, step, state, now, written)
    if written.seed is not None and written.seed != whose.seed:
      log.warning(
        '%s was written with seed %s, and the config has %s: batches and '
        'dropout from here on are those of the new seed.',
        path,
        written.seed,
        whose.seed,
      )
    return state

  return agreement.persistently(attempt, str(path), sleep)


def _read(
  path: epath.Path, step: int, abstract: PyTree, whose: Whose
) -> tuple[Manifest, PyTree]:
  """This process's part of a step, of which the arrays are not yet verified.

  Raises:
    UserError: it is another run's or another step, or of another model.
    Exception: it is damaged, or cannot be read.
  """
  if not steps.listing(path):
    raise OSError(
      errno.ESTALE,
      'the main process sees it and this one does not (do all processes have '
      'the same file system?)',
      str(path),
    )
  written = manifest.read(path)
  if written.step not in (None, step):
    raise _renamed(path, step, written.step)
  if written.run not in (None, whose.run):
    raise UserError(
      f'{path} was written by another run (id {written.run}, seed '
      f'{written.seed}) than the one of this directory (id {whose.run}, seed '
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
  now: dict[str, Any],
  written: Manifest,
) -> None:
  manifest.compare(now, written.leaves)
  leaf = tree.flatten(state).get('step')
  if leaf is not None and int(jax.device_get(leaf)) != step:
    raise _renamed(path, step, int(jax.device_get(leaf)))


def _renamed(path: epath.Path, step: int, inside: int | None) -> UserError:
  return UserError(
    f'{path} holds step {inside}, not {step}: it was renamed or copied. '
    f'Rename it to {path.parent / str(inside)}, or move it away.'
  )
