"""Runs the evaluators of a run when they are due."""

import contextlib
from collections.abc import Callable
from typing import Any

from vit_jax.config import durations, schema
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Evaluator, Setting
from vit_jax.objectives.contract import metric_suffix
from vit_jax.processes.preemption import StopRequested
from vit_jax.training.experiment import Experiment

PyTree = Any
Results = dict[str, float]
Timed = Callable[[str], contextlib.AbstractContextManager[None]]


def is_due(every: str, experiment: Experiment, step: int) -> bool:
  """Returns whether an evaluation, a figure or a checkpoint is due.

  The result depends on the step only, so a run that is restored at a step
  repeats everything that is due after it.

  Args:
    every: interval, such as '10 %' of the training; '0 steps' for the last step
      only.
    experiment: experiment of the run.
    step: number of updates completed.
  """
  interval, total = experiment.steps(every), experiment.total_steps
  if step == total:
    return step > 0
  if step <= 0 or interval == 0 or step % interval:
    return False
  # An interval in other units was rounded by at most half a step, so its last
  # multiple may be a few steps before the end: half a step for each multiple.
  # Nothing is due there, because the last step follows at once. For example,
  # 10 % of 1,004 steps is rounded to 100, and the tenth multiple is step 1,000.
  is_rounded = durations.parse(every)[1] != 'steps'
  slack = step / interval / 2 if is_rounded else 0
  return total - step > min(slack, interval / 2)


class Evaluations:
  """The evaluators of a run; each has its own schedule."""

  def __init__(self, experiment: Experiment, setting: Setting, timed: Timed):
    """Builds all evaluators of a config, and opens their data.

    Args:
      experiment: experiment of the run.
      setting: arguments common to all evaluators.
      timed: function (kind of work) → context manager, see `Session.timed`.

    Raises:
      UserError: an evaluator cannot be built; the message contains its name.
    """
    self._timed, self._experiment = timed, experiment
    self._runners: dict[str, Evaluator] = {}
    for name, section in experiment.config.evals.items():
      try:
        own = setting.for_section(section)
        self._runners[name] = schema.build('evals', section, own)
      except UserError as error:  # the message lacks the name of the section
        raise UserError(f'config.evals.{name}: {error}') from error

  def due(self, step: int) -> list[str]:
    """Returns the names of evaluators due after `step` updates."""
    evals = self._experiment.config.evals
    return [
      name
      for name in self._runners
      if is_due(evals[name].every, self._experiment, step)
    ]

  def run(
    self, names: list[str], weights: dict[str, PyTree], step: int
  ) -> Results | None:
    """Runs evaluators on every set of weights.

    Args:
      names: result of `due`.
      weights: sets of weights after `step` updates, see `Trainer.weights`.
      step: number of updates completed.

    Returns:
      Metrics by name: 'val/accuracy', and 'val_ema/accuracy' for the average of
      the parameters. None if a signal ended the evaluation; a resumed run then
      repeats it.
    """
    results: Results = {}
    for name in names:
      try:
        with self._timed('eval'):
          scores = self._runners[name].run_all(weights, step)
      except StopRequested:
        return None
      for kind, own in scores.items():
        prefix = f'{name}{metric_suffix(kind)}/'
        results |= {prefix + key: value for key, value in own.items()}
    return results
