"""Saves and restores the states of one run."""

import concurrent.futures
import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.checkpoint import agreement, items, manifest, restore, steps
from vit_jax.config import direction, durations, schema
from vit_jax.errors import StorageError, check_range
from vit_jax.files import paths
from vit_jax.files.paths import Cause
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
PyTree = Any


class Barrier:
  """Replaces the barrier at which the threads of a save wait for each other.

  At Orbax's own barrier, the other processes would wait 20 minutes for one that
  has failed. Here, a process reaches the barrier also if it has failed, with
  the cause, and the save then fails on all processes:

      barrier = Barrier('save/100')
      with barrier.reporting():  # an error is reported to the others
        …  # Orbax saves, and calls `barrier`

  Attributes:
    name: name of the barrier, the same on all processes.
  """

  def __init__(self, name: str):
    """Creates a barrier that no process has reached."""
    self.name, self._calls, self._has_failed = name, 0, False

  def __call__(
    self, *, key: str = '', timeout_ms: int = 1_200_000, failure: str = ''
  ) -> None:
    """Waits for the other processes; Orbax calls it twice for each step.

    Args:
      key: Orbax's name of the barrier; not used, because a process that failed
        cannot determine it.
      timeout_ms: time limit; by default that of Orbax for a save.
      failure: cause of a failure of this process.

    Raises:
      OSError: a process has failed.
    """
    self._calls += 1
    failures = consensus.gather_failures(
      f'{self.name}/{self._calls}', failure, timeout_ms
    )
    if failures:
      self._has_failed = True
      raise OSError('; '.join(failures))

  @contextlib.contextmanager
  def reporting(self) -> Iterator[None]:
    """Reports an error of the body, unless it was raised by this barrier."""
    try:
      yield
    except Exception as error:
      if not self._has_failed:
        with contextlib.suppress(Exception):
          self(failure=agreement.root_cause(error))
      raise


@schema.operational('every', 'keep', 'best')
class Checkpointer:
  """Saves steps in `directory/<step>/`, and verifies them when restoring.

  Attributes:
    root: directory of the steps.
    every: duration between two saves.
    best: name of the metric whose best step is kept, or None.
    sign: -1 if lower values of this metric are better, otherwise 1.
    failures: number of saves that failed.
    last_failure: cause of the last failure; '' before the first one.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    about: dict[str, Any],
    /,
    *,
    every: str = '1 epochs',
    keep: int = 2,
    best: str | None = None,
  ):
    """Opens a directory of checkpoints, and creates it if necessary.

    Args:
      directory: usually WORKDIR/checkpoints; a local path or gs:// address.
      about: JSON-able item that is written with every step.
      every: duration between two saves.
      keep: number of newest steps to keep, at least 2.
      best: name of a metric ('val/accuracy') whose best step is kept, too: that
        with the highest value, or the lowest for a loss. Every step at which
        the metric is computed is saved.

    Raises:
      UserError: a value is out of range, or there is no permission to write the
        directory.
      StorageError: the storage fails.
    """
    durations.check('checkpoint.every', every)
    # A run can resume even if the newest step is damaged.
    check_range('checkpoint.keep', keep, at_least=2)
    self.root = paths.locate(directory)
    self._about, self._keep = about, keep
    self.every, self.best = every, best
    self.sign = direction.of_best(about.get('config', {}))
    self.failures, self.last_failure = 0, ''
    steps.check_path(self.root)
    try:
      agreement.on_main(self._open_directory)
      self._run = restore.find_run_id(self.root)
    except agreement.FailedError as error:
      cause = error.local_error or error
      raise paths.storage_error(self.root, 'opened', cause) from error
    self._open_writer()
    self._pending: tuple[int, concurrent.futures.Future[None]] | None = None

  def _open_directory(self) -> None:
    """Creates the directory, and removes unfinished steps from it."""
    self.root.mkdir(parents=True, exist_ok=True)
    steps.remove_unfinished(self.root)
    known = {str(step) for step in steps.committed(self.root)}
    for name in sorted(steps.listing(self.root) - known):
      if name.strip().isnumeric():
        log.warning(
          '%s is not a checkpoint of this program. It is not changed, and a '
          'step of that name cannot be saved.',
          self.root / name,
        )

  def _open_writer(self) -> None:
    """Opens a writer of steps, and a thread that waits for it.

    The names of its barriers contain the number of failures, because a new
    writer is opened after a failed save, and some processes may have passed
    barriers of the old one that others have not.
    """
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._barrier = Barrier(f'saving_{self.failures}')
    metrics = ocp.JsonCheckpointHandler(filename='metrics')
    multiprocessing: Any = ocp.options.MultiprocessingOptions(
      barrier_sync_key_prefix=self._barrier.name
    )
    options = ocp.CompositeOptions(multiprocessing_options=multiprocessing)
    self._writer = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(
        *items.NAMES, metrics=metrics, composite_options=options
      ),
      async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier),
      multiprocessing_options=multiprocessing,
    )

  def latest_step(self) -> int | None:
    """Returns the newest committed step; None if there is none.

    Raises:
      StorageError: the directory cannot be listed.
    """
    return steps.latest(self.root)

  def read_about(self, step: int) -> dict[str, Any]:
    """Reads the item `about` of a step; see `restore.load_about`."""
    return restore.load_about(self.root / str(step))

  def is_committed(self, step: int) -> bool:
    """Returns whether a step is committed, according to the main process."""

    def is_step() -> bool:
      try:
        return steps.is_step(self.root / str(step))
      except OSError as error:
        log.error('%s cannot be listed: %s', self.root, error)
        return False

    return consensus.from_main(is_step)

  def save(
    self,
    step: int,
    state: PyTree,
    metrics: dict[str, float],
    history: dict[str, Any] | None = None,
  ) -> bool:
    """Starts writing a step in the background.

    The state may be donated as soon as this returns, because its arrays are
    copied to the host first. A failure is logged and counted, and does not
    affect steps saved earlier.

    Args:
      step: number of updates completed.
      state: a TrainState.
      metrics: metrics of the evaluation at this step, for `best`. If the step
        was already saved without them, they are added to it.
      history: JSON-able history of the run up to this step; written into
        `about`.

    Returns:
      Whether the step is being written, or was written before.
    """
    self.wait()
    # Only the metric that selects the best step is stored with the step.
    best = {self.best: metrics[self.best]} if self.best in metrics else None
    if self.is_committed(step):
      self._attempt(step, self._add_metrics, step, best)
      return True
    # Orbax writes in the background, while the run may change objects in
    # `history`. The copy agrees with the checksum in the manifest.
    about = copy.deepcopy(self._about | (history or {}))
    seed = about.get('config', {}).get('seed')
    written = manifest.make(state, about, step=step, run=self._run, seed=seed)
    args = {
      name: ocp.args.StandardSave(arrays)
      for name, arrays in items.split(state).items()
    }
    args |= {
      'about': ocp.args.JsonSave(about),
      'manifest': ocp.args.JsonSave(written),
    }
    if best:
      content = manifest.with_checksum({'step': step, **best})
      args['metrics'] = ocp.args.JsonSave(content)
    # A process that cannot write must not begin, because the others would wait
    # for it at Orbax's barriers.
    if not self._attempt(step, self._prepare, step):
      return False
    return self._attempt(step, self._start_writing, step, args)

  def _attempt(
    self, step: int, function: Callable[..., None], *arguments: Any
  ) -> bool:
    """Calls one stage of a save; returns whether all processes succeeded.

    A failure on any process is logged and counted.
    """
    local_error = None
    try:
      function(*arguments)
    except Exception as error:  # noqa: BLE001 (file systems raise many types)
      local_error = error
    if not any(consensus.gather_integer(local_error is not None)):
      return True
    self._handle_failure(step, local_error)
    return False

  def _prepare(self, step: int) -> None:
    """Checks that the step can be written, and writes the id of the run."""
    if jax.process_index() == 0:
      steps.check_writable(self.root, step)
      restore.record_run_id(self.root, self._run)

  def _start_writing(self, step: int, args: dict[str, Any]) -> None:
    """Copies the arrays to the host, and starts writing them."""
    composite = ocp.args.Composite(**args)
    with self._barrier.reporting():
      self._writer.save(self.root / str(step), args=composite)
    finished = self._thread.submit(self._finish, self._writer, self._barrier)
    self._pending = step, finished

  def _finish(self, writer: ocp.AsyncCheckpointer, barrier: Barrier) -> None:
    """Waits until a step is committed; then removes old steps."""
    with barrier.reporting():
      writer.wait_until_finished()
    if jax.process_index() == 0:
      steps.remove_old(self.root, self._run, self._keep, self.best, self.sign)

  def _add_metrics(self, step: int, best: dict[str, float] | None) -> None:
    """Writes the best metric to a step that was saved without it."""
    if best and jax.process_index() == 0:
      steps.add_metrics(self.root / str(step), step, best)

  def wait(self) -> bool:
    """Waits until the current save has finished.

    All processes must call it at the same step.

    Returns:
      Whether the save succeeded; True if there was none.
    """
    if self._pending is None:
      return True
    (step, finished), self._pending = self._pending, None
    if self._attempt(step, finished.result):
      return True
    # All processes have stopped writing, so the incomplete step can be removed
    # to free its space.
    if jax.process_index() == 0:
      with contextlib.suppress(OSError):
        steps.remove_unfinished(self.root)
    return False

  def _handle_failure(self, step: int, error: Exception | None) -> None:
    """Logs and counts a failed save, and opens a new writer.

    Args:
      step: number of updates completed.
      error: error of this process; None if only another process failed.
    """
    self.failures += 1
    self.last_failure = 'another process failed'
    if error is not None:
      self.last_failure = agreement.root_cause(error)
      if paths.cause(agreement.innermost(error)) is Cause.FULL:
        self.last_failure = f'the disk of {self.root} is full'
    log.error(
      'SAVING STEP %s FAILED (%d failure(s) so far): %s. Steps saved earlier '
      'are not affected, and the next save will be made when it is due.',
      step,
      self.failures,
      self.last_failure,
    )
    # A failed writer cannot be used again.
    self._pending = None
    self._open_writer()

  def best_line(self) -> str | None:
    """Returns a log line about the best step; None if no step is the best."""
    if self.best is None:
      return None
    try:
      candidates = steps.committed(self.root)
      best, _ = steps.best_step(self.root, candidates, self.best, self.sign)
    except (OSError, StorageError) as error:  # must not end a finished run
      log.warning('the best step cannot be determined: %s', error)
      return None
    if best is None:
      return None
    step, value = best
    return (
      f'best {self.best} {value:.6g} at step {step}, kept in '
      f'{self.root / str(step)}; other commands take it by --step=best'
    )

  def restore_latest(self, abstract: PyTree) -> tuple[PyTree, int] | None:
    """Restores the newest intact step.

    A damaged step is renamed, never deleted; the cause is logged, and the next
    older step is tried. If the storage fails, reading is repeated after growing
    pauses.

    Args:
      abstract: a TrainState of jax.ShapeDtypeStruct with shardings; the steps
        may have been written on another mesh.

    Returns:
      (state, step), or None if no step was ever committed.

    Raises:
      UserError: all steps are damaged; or the newest step has other parameters
        than the config's model, belongs to another run, contains another step
        than the name of its directory, or there is no permission to read it.
        Only damaged steps are renamed.
      StorageError: the newest step cannot be read, even after retries.
    """
    return restore.newest(self.root, abstract, self._run)

  def close(self) -> None:
    """Waits for the current save, without communicating with other processes.

    It is also called after errors, when other processes may have ended.
    """
    pending, self._pending = self._pending, None
    if pending is not None:
      step, finished = pending
      try:
        finished.result()
      except Exception as error:  # noqa: BLE001 (file systems raise many types)
        self._handle_failure(step, error)
    self._thread.shutdown()
    self._writer.close()
