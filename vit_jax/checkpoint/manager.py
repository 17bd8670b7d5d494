"""Saves and restores the states of one run."""

import logging
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from vit_jax import durations
from vit_jax.checkpoint import items
from vit_jax.errors import UserError, check_range

log = logging.getLogger('vit_jax')
PyTree = Any


class Checkpointer:
  """Steps in `directory/<step>/`, each verified when it is restored."""

  def __init__(
    self,
    directory: epath.PathLike,
    about: dict[str, Any],
    /,
    *,
    every: str = '1 epochs',
    every_minutes: float | None = None,
    keep: int = 2,
    best: str | None = None,
  ):
    """Opens (or makes) a directory of checkpoints.

    Args:
      directory: usually WORKDIR/checkpoints; local or gs://.
      about: JSON-able, written with every step.
      every: duration between two saves, of which the loop takes care.
      every_minutes: save too when so much time has passed (looked at with
        every log line).
      keep: newest steps kept, at least 2.
      best: name of a metric ('val/accuracy', higher is better) whose best
        step is kept besides.

    Raises:
      UserError: keep < 2, no duration or minutes to wait for, or the directory
        cannot be made.
    """
    durations.check('checkpoint.every', every)
    check_range('checkpoint.every_minutes', every_minutes, above=0)
    if keep < 2:
      raise UserError(
        f'checkpoint.keep is {keep}; at least 2, so that a damaged newest one '
        'does not end a run.'
      )
    self._root = epath.Path(directory).absolute()
    self._about, self._best, self._keep = about, best, keep
    self.failures = 0
    try:
      self._manager = self._open()
    except OSError as error:
      raise UserError(
        f'checkpoints cannot be written to {directory}: {error}. Give another '
        '--workdir.'
      ) from error

  def _open(self) -> ocp.CheckpointManager:
    preserved: list[Any] = [policies.LatestN(self._keep)]
    best = self._best
    score = None if best is None else lambda metrics: metrics[best]
    if score is not None:
      preserved.append(
        policies.BestN(
          n=1, get_metric_fn=score, keep_checkpoints_without_metrics=False
        )
      )
    return ocp.CheckpointManager(
      self._root,
      item_names=items.NAMES,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(preserved),
        best_fn=score,  # without it no metrics are written
        cleanup_tmp_directories=True,
      ),
    )

  def latest_step(self) -> int | None:
    """The newest step saved or being saved, None if there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state: PyTree, metrics: dict[str, float]) -> bool:
    """Starts writing a step in the background.

    The state may be donated as soon as this returns: its arrays are copied to
    the host first. A write that fails is reported and counted, and leaves what
    was saved before as it is.

    Args:
      step: updates completed.
      state: a TrainState.
      metrics: of the evaluation at this step, for `best`; a step saved before
        without them gets them now.

    Returns:
      Whether the step is being written.
    """
    self.settle()
    best = {self._best: metrics[self._best]} if self._best in metrics else None
    if step in self._manager.all_steps():
      try:
        if best and self._manager.metrics(step) is None:
          self._add_metrics(step, best)
      except Exception as error:  # noqa: BLE001 (whatever a file system raises)
        self._failed(step, error)
      return True
    args = ocp.args.Composite(
      about=ocp.args.JsonSave(self._about),
      manifest=ocp.args.JsonSave(items.manifest(state)),
      **{k: ocp.args.StandardSave(v) for k, v in items.split(state).items()},
    )
    try:
      saved = self._manager.save(step, metrics=best, args=args)
    except Exception as error:  # noqa: BLE001 (whatever a file system raises)
      self._failed(step, error)
      return False
    if not saved:
      raise RuntimeError(f'Orbax did not save step {step}')
    return True

  def _add_metrics(self, step: int, metrics: dict[str, float]) -> None:
    """Writes what Orbax's manager writes beside a state's items."""
    handler = ocp.JsonCheckpointHandler(filename='metrics')
    with ocp.Checkpointer(handler) as writer:
      args = ocp.args.JsonSave(metrics)
      writer.save(self._root / str(step) / 'metrics', args=args)
    self._manager.reload()

  def settle(self) -> bool:
    """Waits until what was begun is on disk; False if that failed."""
    try:
      self._manager.wait_until_finished()
      return True
    except Exception as error:  # noqa: BLE001 (whatever a file system raises)
      self._failed(self._manager.latest_step(), error)
      return False

  def _failed(self, step: int | None, error: Exception) -> None:
    self.failures += 1
    log.error(
      'SAVING STEP %s FAILED (%d failure(s) so far): %s. What was saved before '
      'is safe; the next save is tried when it is due.',
      step,
      self.failures,
      items.root_cause(error),
    )
    self._manager = self._open()  # forgets the half-written step

  def restore_latest(self, abstract: PyTree) -> tuple[PyTree, int] | None:
    """The newest step that is whole, on the shardings that `abstract` carries.

    A step that is damaged is set aside (renamed, never deleted) with its cause
    in the log, and the next older one is tried.

    Args:
      abstract: a TrainState of jax.ShapeDtypeStruct with shardings; the steps
        may have been written on another mesh.

    Returns:
      (state, step), or None where nothing was ever committed.

    Raises:
      UserError: every step is damaged, or they hold other parameters than the
        config's model (nothing is set aside then).
    """
    found = self._steps()
    for step in sorted(found, reverse=True):
      try:
        return self._restore(step, abstract), step
      except UserError:
        raise
      except Exception as error:  # noqa: BLE001 (damage raises anything)
        self.set_aside(step, items.root_cause(error))
    damaged = sorted(p.name for p in self._root.glob('*.bad*'))
    if found or damaged:
      raise UserError(
        f'no checkpoint in {self._root} is whole; set aside: '
        f'{", ".join(damaged)}. The log above has their causes. Mend one and '
        'rename it to its step, or take another --workdir to start anew.'
      )
    return None

  def _steps(self) -> list[int]:
    return [int(p.name) for p in self._root.iterdir() if p.name.isdigit()]

  def _restore(self, step: int, abstract: PyTree) -> PyTree:
    path = self._root / str(step)
    written = items.read_json(path / 'manifest')
    items.check_shapes(
      str(path), items.manifest_shapes(written), items.shapes(abstract)
    )
    wanted = {
      name: ocp.args.StandardRestore(item)
      for name, item in items.split(abstract).items()
    }
    restored = self._manager.restore(step, args=ocp.args.Composite(**wanted))
    state = items.join({name: restored[name] for name in wanted}, abstract)
    items.verify(state, written)
    return state

  def set_aside(self, step: int, cause: str) -> None:
    """Renames a step to `<step>.bad`, where no restore looks for it."""
    path = self._root / str(step)
    log.error('checkpoint %s is set aside: %s', path, cause)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f'set aside {step}')
    if jax.process_index() == 0:
      target, number = self._root / f'{step}.bad', 1
      while target.exists():
        target, number = self._root / f'{step}.bad{number}', number + 1
      path.rename(target)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f'was set aside {step}')
    self._manager.reload()

  def close(self) -> None:
    """Waits until everything is on disk."""
    self.settle()
    self._manager.close()
