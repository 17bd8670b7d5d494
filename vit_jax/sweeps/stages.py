"""Determines the progress of tasks and their stages from the workdirs."""

from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.sweeps import grid, jobs, results
from vit_jax.sweeps.grid import DEV, FINAL, Run, Task
from vit_jax.sweeps.results import Score


class Progress(NamedTuple):
  """The progress of the runs of a task or a transfer.

  Attributes:
    runs: runs that can be listed already; those of a final stage can be listed
      once all runs of the dev stage are finished.
    scores: scores of the finished runs.
    complete: whether all runs are finished.
  """

  runs: list[Run]
  scores: list[Score]
  complete: bool

  @property
  def ready(self) -> list[Run]:
    """Returns the runs that can be started or resumed now."""
    finished = {score.run.workdir for score in self.scores}
    return [run for run in self.runs if run.workdir not in finished]


def of_runs(runs: Sequence[Run]) -> Progress:
  """Returns the progress of runs that do not depend on each other."""
  values = [(run, jobs.value(run)) for run in runs]
  scores = [Score(run, value) for run, value in values if value is not None]
  return Progress([*runs], scores, len(scores) == len(runs))


def of_task(
  name: str, task: Task, workdir: str, extra_flags: Sequence[str]
) -> Progress:
  """Returns the progress of a task.

  Until the dev stage is finished, the final stage is not included.

  Args:
    name: name of the task.
    task: task of a sweep.
    workdir: workdir of the sweep.
    extra_flags: flags '--config.KEY=value' that are added to all runs.
  """
  if task.dev is None:
    chosen = task.settings[0]
    return of_runs(grid.runs(name, task, FINAL, workdir, extra_flags, chosen))
  dev = of_runs(grid.runs(name, task, DEV, workdir, extra_flags))
  if not dev.complete:
    return dev
  chosen = results.best(dev.scores)
  final = of_runs(grid.runs(name, task, FINAL, workdir, extra_flags, chosen))
  return Progress(
    dev.runs + final.runs, dev.scores + final.scores, final.complete
  )
