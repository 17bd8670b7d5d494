"""Where a task stands: its stages follow each other, told by workdirs alone."""

from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.sweeps import grid, jobs, results
from vit_jax.sweeps.grid import DEV, FINAL, Run, Task
from vit_jax.sweeps.results import Score


class Standing(NamedTuple):
  """What is known of some runs that belong together.

  Attributes:
    runs: all that can be named already; those of a final stage once the dev
      stage has chosen.
    scores: of those that are finished.
    complete: whether nothing is left to be done.
  """

  runs: list[Run]
  scores: list[Score]
  complete: bool

  @property
  def ready(self) -> list[Run]:
    """What can be started now, or resumed."""
    finished = {score.run.workdir for score in self.scores}
    return [run for run in self.runs if run.workdir not in finished]


def of_runs(runs: Sequence[Run]) -> Standing:
  """Of runs that need nothing of each other."""
  values = [(run, jobs.value(run)) for run in runs]
  scores = [Score(run, value) for run, value in values if value is not None]
  return Standing([*runs], scores, len(scores) == len(runs))


def of_task(
  name: str, task: Task, workdir: str, given: Sequence[str]
) -> Standing:
  """Of a task: the dev stage where it has one, then the final one.

  Args:
    name: of the task.
    task: the task.
    workdir: that of all.
    given: '--config.KEY=value' for all of its runs.
  """
  if task.dev is None:
    chosen = task.settings[0]
    return of_runs(grid.runs(name, task, FINAL, workdir, given, chosen))
  dev = of_runs(grid.runs(name, task, DEV, workdir, given))
  if not dev.complete:
    return dev
  chosen = results.best(dev.scores)
  final = of_runs(grid.runs(name, task, FINAL, workdir, given, chosen))
  return Standing(
    dev.runs + final.runs, dev.scores + final.scores, final.complete
  )
