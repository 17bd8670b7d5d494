"""Runs the evaluators of a run, and draws its figures, when they are due."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from etils import epath

from vit_jax.config import durations, schema
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Evaluator, Setting
from vit_jax.objectives.contract import metric_suffix
from vit_jax.processes.preemption import StopRequested
from vit_jax.training.experiment import Experiment
from vit_jax.training.recorder import Figures

PyTree = Any
Results = dict[str, float]
Timed = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The steps after which an evaluation, a figure or a checkpoint is due.

  Attributes:
    every_steps: interval in steps; 0 for the last step only.
    total_steps: number of updates in the whole training.
    is_rounded: whether the interval was rounded to whole steps. Its last
      multiple may then be a few steps before the end of the training; nothing
      is due there.
  """

  every_steps: int
  total_steps: int
  is_rounded: bool = False

  @classmethod
  def of(cls, every: str, experiment: Experiment) -> 'Schedule':
    """Returns the schedule with an interval such as '10 %' of the training."""
    return cls(
      experiment.steps(every),
      experiment.total_steps,
      is_rounded=durations.parse(every)[1] != 'steps',
    )

  def due(self, step: int) -> bool:
    """Returns whether something is due after `step` updates.

    The result depends on the step only, so a run that is restored at a step
    repeats everything that is due after it.
    """
    if step == self.total_steps:
      return step > 0
    if step <= 0 or self.every_steps == 0 or step % self.every_steps:
      return False
    left = self.total_steps - step
    # Each interval was rounded by at most half a step.
    slack = step / self.every_steps / 2 if self.is_rounded else 0
    return left > min(slack, self.every_steps / 2)


class Evaluations:
  """The evaluators of a run and the plots that it draws.

  Each has its own schedule.
  """

  def __init__(
    self,
    experiment: Experiment,
    setting: Setting,
    workdir: epath.Path,
    timed: Timed,
  ):
    """Builds all evaluators and figures of a config, and opens their data.

    Args:
      experiment: experiment of the run.
      setting: arguments common to all evaluators.
      workdir: directory of the run; figures are written there.
      timed: function (kind of work) → context manager, see `Session.timed`.

    Raises:
      UserError: an evaluator or a figure cannot be built; the message contains
        its name.
    """
    self._timed = timed
    self._weights = experiment.trainer.weights
    self._entries: dict[str, tuple[Schedule, Evaluator | Figures]] = {}
    for name, section in experiment.config.evals.items():
      schedule = Schedule.of(section.every, experiment)
      constructor = schema.constructor('evals', section)
      try:
        runtime: tuple[Any, ...] = (setting.for_section(section),)
        if constructor is Figures:
          runtime = experiment, setting, workdir
        built = schema.construct(constructor, section, *runtime)
      except UserError as error:  # the message lacks the name of the section
        raise UserError(f'config.evals.{name}: {error}') from error
      self._entries[name] = schedule, built

  def due(self, step: int) -> list[str]:
    """Returns the names of evaluators and figures due after `step` updates."""
    return [
      name
      for name, (schedule, _) in self._entries.items()
      if schedule.due(step)
    ]

  def run(self, names: list[str], state: PyTree, step: int) -> Results | None:
    """Runs evaluators on every set of weights, and draws figures.

    Args:
      names: result of `due`.
      state: state after `step` updates.
      step: number of updates completed.

    Returns:
      Metrics by name: 'val/accuracy', and 'val_ema/accuracy' for the average of
      the parameters. None if a signal ended the evaluation; a resumed run then
      repeats it.
    """
    results: Results = {}
    for name in names:
      runner, weights = self._entries[name][1], self._weights(state)
      try:
        if isinstance(runner, Figures):
          with self._timed('eval'):
            runner.draw(weights, f'step {step:,}')
          continue
        for kind, params in weights.items():
          with self._timed('eval'):
            scores = runner.run(params)
          prefix = f'{name}{metric_suffix(kind)}/'
          results |= {prefix + key: value for key, value in scores.items()}
      except StopRequested:
        return None
    return results
