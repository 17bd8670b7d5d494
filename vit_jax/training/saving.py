"""Saves the checkpoints of a run when they are due."""

import time
from collections.abc import Callable
from typing import Any

from vit_jax.checkpoint import Checkpointer
from vit_jax.errors import StorageError
from vit_jax.processes import consensus
from vit_jax.run.ledger import Ledger
from vit_jax.training.evaluations import Results, Schedule, Timed
from vit_jax.training.experiment import Experiment

PyTree = Any


class Saving:
  """The checkpoints of a run, and the schedule on which they are saved."""

  def __init__(
    self,
    experiment: Experiment,
    checkpoints: Checkpointer,
    ledger: Ledger,
    timed: Timed,
    history: Callable[[], dict[str, Any]],
  ):
    """Starts the clock of `checkpoint.every_minutes`.

    Args:
      experiment: experiment of the run.
      checkpoints: checkpoints of the run.
      ledger: destination of the event `save_failed`.
      timed: function (kind of work) → context manager, see `Session.timed`.
      history: function that returns the history of the run, JSON-able; a
        checkpoint stores it next to the state.
    """
    self._schedule = Schedule.of(checkpoints.every, experiment)
    self._log_steps = experiment.steps(experiment.log.every)
    self._checkpoints, self._ledger = checkpoints, ledger
    self._timed, self._history = timed, history
    self._saved_at = time.monotonic()
    self._results: Results = {}  # evaluation results in the last save

  def due(self, step: int) -> bool:
    """Returns whether a checkpoint is due after `step` updates.

    All processes must call it: the main process decides by its clock whether
    `checkpoint.every_minutes` have passed.
    """
    minutes = self._checkpoints.every_minutes
    # Minutes are checked only at logged steps, because the processes must
    # communicate to agree.
    if self._schedule.due(step) or minutes is None or step % self._log_steps:
      return self._schedule.due(step)
    return consensus.from_main(
      lambda: time.monotonic() - self._saved_at >= 60 * minutes
    )

  def save(
    self, step: int, state: PyTree, results: Results | None = None
  ) -> None:
    """Starts saving a step, or adds results to a step that is already saved.

    A failure is logged and does not end the run: the next save may succeed.

    Args:
      step: number of updates completed.
      state: state after these updates.
      results: metrics of the evaluation after these updates.
    """
    self._results = results = results or {}
    with self._timed('save'):
      if not self._checkpoints.save(step, state, results, self._history()):
        self._ledger.event('save_failed', step=step)
    self._saved_at = time.monotonic()

  def finish(self, step: int, state: PyTree) -> None:
    """Waits for the last save, and repeats it if the step is not on disk.

    Args:
      step: number of updates completed.
      state: state after these updates.

    Raises:
      StorageError: the step could not be saved.
    """
    with self._timed('save'):
      self._checkpoints.wait()
      if self._checkpoints.is_committed(step):
        return
      self._checkpoints.save(step, state, self._results, self._history())
      self._checkpoints.wait()
      if not self._checkpoints.is_committed(step):
        raise StorageError(
          f'step {step} could not be saved; the newest saved step of '
          f'{self._checkpoints.root} is {self._checkpoints.latest_step()}. The '
          f'cause is: {self._checkpoints.last_failure}. Fix it, and run the '
          'same command.'
        )
