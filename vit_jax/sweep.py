"""Searches a grid: python -m vit_jax.sweep --config=configs/sweeps/digits.py.

For each task of the sweep, every setting is trained on a part of the data and
evaluated on the rest (the dev stage). The setting with the best mean over seeds
is then trained on all training data and evaluated on the test split (the final
stage). The runs are executed one after another on this machine; the same
command resumes where it stopped. If a run fails, the rest of its task is
skipped, the other tasks continue, and the command ends with the list of errors.
--config.KEY=value applies to all runs.
WORKDIR contains results.csv, results.md and a workdir for each run.

--print_jobs prints the commands of the unfinished runs that can start now, one
per line, for a cluster: first those of the dev stage; when they are done, the
same command prints those of the final stage.
"""

from absl import flags

from vit_jax.cli import process
from vit_jax.sweeps import execution, grid, jobs, tables


def define_flags() -> None:
  """Defines the flags of this command."""
  execution.define_flags()


def main(arguments: list[str]) -> None:
  """Executes a sweep and prints its table of results."""
  values = flags.FLAGS
  sweep, workdir = execution.load(arguments, 'sweeps', grid.Sweep)
  execution.execute(
    lambda: jobs.of_sweep(sweep, workdir, values.overrides),
    lambda graph: tables.of_sweep(sweep, graph),
    workdir,
    values.print_jobs,
  )


if __name__ == '__main__':
  process.run(main, define_flags)
