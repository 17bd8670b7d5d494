"""Searches a grid: python -m vit_jax.sweep --config=configs/sweeps/digits.py.

For each task of the sweep, every setting is trained on a part of the data and
evaluated on the rest (the dev stage). The setting with the best mean over seeds
is then trained on all training data and evaluated on the test split (the final
stage). The runs are executed one after another on this machine; the same
command resumes where it stopped. --config.KEY=value applies to all runs.
WORKDIR contains results.csv, results.md and a workdir for each run.

--print_jobs prints the commands of the unfinished runs that can start now, one
per line, for a cluster: first those of the dev stage; when they are done, the
same command prints those of the final stage.
"""

from collections.abc import Sequence

from absl import flags

from vit_jax.cli import process
from vit_jax.files import atomic, paths
from vit_jax.sweeps import frame, grid, jobs, results, stages
from vit_jax.sweeps.grid import Sweep
from vit_jax.sweeps.results import Score

Scores = dict[str, list[Score]]


def define_flags() -> None:
  """Defines the flags of this command."""
  frame.define_flags('sweep', 'sweeps')


def run(
  sweep: Sweep,
  workdir: str,
  extra_flags: Sequence[str] = (),
  print_jobs: bool = False,
) -> Scores:
  """Runs a sweep, or prints the commands of its runs.

  Args:
    sweep: sweep of a config.
    workdir: local directory of all runs.
    extra_flags: flags '--config.KEY=value' that are added to all runs.
    print_jobs: whether to print the commands instead of running them.

  Returns:
    The finished runs of each task, with their scores.

  Raises:
    UserError: a run failed, or the workdir belongs to another sweep.
    PreemptedError: a signal arrived.
  """
  scores: Scores = {}
  total = sum(task.num_runs for task in sweep.tasks.values())
  for name, task in sweep.tasks.items():
    while True:
      progress = stages.of_task(name, task, workdir, extra_flags)
      jobs.check_flags(workdir, progress.runs)
      if print_jobs or not progress.ready:
        break
      done = len(progress.scores) + sum(map(len, scores.values()))
      jobs.finish(progress.ready, done=done, total=total)
    for job in progress.ready:
      print(jobs.line(job))
    scores[name] = progress.scores
    if progress.complete:
      _write(sweep, workdir, scores)
  _write(sweep, workdir, scores)
  return scores


def _write(sweep: Sweep, workdir: str, scores: Scores) -> None:
  """Writes the tables of the finished runs."""
  folder = paths.locate(workdir)
  atomic.save(folder / 'results.csv', results.rows(scores, sweep.tasks))
  atomic.save(folder / 'results.md', results.table(sweep, scores))


def main(arguments: list[str]) -> None:
  """Executes a sweep and prints its table of results."""
  values = flags.FLAGS
  sweep, workdir = frame.load_config(arguments, 'sweeps', grid.load)
  run(sweep, workdir, values.overrides, values.print_jobs)
  frame.print_table(workdir)


if __name__ == '__main__':
  process.run(main, define_flags)
