"""Saves the checkpoints of a run when they are due."""

from collections.abc import Callable
from typing import Any

from vit_jax.checkpoint import Checkpointer
from vit_jax.errors import StorageError
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
    """Stores the arguments.

    Args:
      experiment: experiment of the run.
      checkpoints: checkpoints of the run.
      ledger: destination of the event `save_failed`.
      timed: function (kind of work) → context manager, see `Session.timed`.
      history: function that returns the history of the run, JSON-able; a
        checkpoint stores it next to the state.
    """
    # Whether a checkpoint is due after a number of updates.
    self.due = Schedule.of(checkpoints.every, experiment).due
    self._checkpoints, self._ledger = checkpoints, ledger
    self._timed, self._history = timed, history
    self._results: Results = {}  # evaluation results in the last save

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
          f'step {step} could not be saved ({self._checkpoints.last_failure}); '
          f'the newest saved step of {self._checkpoints.root} is '
          f'{self._checkpoints.latest_step()}. Run the same command again.'
        )
