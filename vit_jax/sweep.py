"""Grids with seeds: python -m vit_jax.sweep --config=configs/sweeps/digits.py.

Of each task of the sweep every setting is trained on a part of the data and
judged on the rest (the dev stage); the setting that is best by the mean over
seeds is trained on everything and judged on the test split (the final stage).
Runs follow each other on this machine; the same command again goes on where it
stopped. --config.KEY=value goes to all runs. WORKDIR gets results.csv,
results.md and a workdir for each run.

--print_jobs prints the commands of the runs that are still to be done and can
be started now, a line each, for a cluster: those of the dev stage at first;
when they are done, the same command again prints those of the final stage.
"""

from collections.abc import Sequence

from absl import flags

from vit_jax.cli import process
from vit_jax.files import atomic, jsonl, paths
from vit_jax.sweeps import frame, grid, jobs, results, stages
from vit_jax.sweeps.grid import Sweep
from vit_jax.sweeps.results import Score

Scores = dict[str, list[Score]]


def define_flags() -> None:
  """The flags of this command."""
  frame.define_flags('sweep', 'sweeps')


def run(
  sweep: Sweep,
  workdir: str,
  given: Sequence[str] = (),
  print_jobs: bool = False,
) -> Scores:
  """Carries a sweep out, or prints what is to be done.

  Args:
    sweep: of a config.
    workdir: of all runs, local.
    given: '--config.KEY=value' for all runs.
    print_jobs: print the commands in place of running them.

  Returns:
    The finished runs of each task with what they were judged by.

  Raises:
    UserError: a run failed, or another sweep is in the workdir.
    PreemptedError: a signal came.
  """
  scores: Scores = {}
  total = sum(task.num_runs for task in sweep.tasks.values())
  for name, task in sweep.tasks.items():
    while True:
      now = stages.of_task(name, task, workdir, given)
      jobs.check_same(workdir, now.runs)
      if print_jobs or not now.ready:
        break
      done = len(now.scores) + sum(map(len, scores.values()))
      jobs.finish(now.ready, done=done, total=total)
    for each in now.ready:
      print(jobs.line(each))
    scores[name] = now.scores
    if now.complete:
      _write(sweep, workdir, scores)
  _write(sweep, workdir, scores)
  return scores


def _write(sweep: Sweep, workdir: str, scores: Scores) -> None:
  """The tables of what is finished."""
  folder = paths.locate(workdir)
  with jsonl.access(folder / 'results.csv', 'written'):
    atomic.write(folder / 'results.csv', results.rows(scores, sweep.tasks))
    atomic.write(folder / 'results.md', results.table(sweep, scores))


def main(arguments: list[str]) -> None:
  """Carries a sweep out and prints its table."""
  values = flags.FLAGS
  sweep, workdir = frame.opened(arguments, 'sweeps', grid.load)
  run(sweep, workdir, values.overrides, values.print_jobs)
  frame.tell(workdir)


if __name__ == '__main__':
  process.run(main, define_flags)
