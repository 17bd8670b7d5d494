"""Lists the runs of a row: pre-trainings, then transfers of their weights."""

import dataclasses
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.study.contents import UPSTREAM, Derived, Evaluation, Row
from vit_jax.sweeps import grid, jobs, stages
from vit_jax.sweeps.grid import FINAL, Run, Task
from vit_jax.sweeps.results import Spread
from vit_jax.sweeps.stages import Progress

# Flags that `evaluate` accepts, too.
_DATA_FLAG = re.compile(r'--?config\.(source|reader)\.')


class ExtraFlags(NamedTuple):
  """Flags of the command line that are added to the runs.

  Attributes:
    pretrain: flags '--config.KEY=value' for pre-trainings only.
    all: flags '--config.KEY=value' for all runs; evaluations get only the flags
      of source and reader.
  """

  pretrain: Sequence[str] = ()
  all: Sequence[str] = ()


class Chain(NamedTuple):
  """Progress of a row.

  Attributes:
    pretrain: progress of the pre-trainings; it has no runs if weights are
      given.
    transfers: progress of the transfers of all pre-trainings, by the keys of
      `Row.transfers`.
    derived: `Row.derived`.
  """

  pretrain: Progress
  transfers: dict[str, Progress]
  derived: Mapping[str, Derived] = {}

  @property
  def progress(self) -> list[Progress]:
    """Returns the progress of the pre-training and of each transfer."""
    return [self.pretrain, *self.transfers.values()]

  def spread(self, column: str) -> Spread | None:
    """Returns the value of a column; None if one of its runs is not finished.

    A column with several transfers has the mean over the transfers, without a
    standard deviation, and a derived column the value of its function.
    """
    if column == UPSTREAM:
      found = [self.pretrain]
    elif column in self.derived:
      found = [self.transfers[key] for key in self.derived[column].of]
    else:
      found = [
        progress
        for name, progress in self.transfers.items()
        if name.partition('/')[0] == column
      ]
    if not self.pretrain.complete or not all(part.complete for part in found):
      return None
    spreads = [
      Spread.of(values)
      for part in found
      if (values := [s.value for s in part.scores if s.run.stage == FINAL])
    ]
    if column in self.derived:
      return _derived(self.derived[column], spreads)
    if len(spreads) < 2 or len(spreads) < len(found):
      return spreads[0] if spreads else None
    mean = math.fsum(spread.mean for spread in spreads) / len(spreads)
    return Spread(mean, math.nan, len(spreads))


def of_row(
  name: str,
  row: Row,
  workdir: str,
  extra_flags: ExtraFlags,
  weights: str | None = None,
) -> Chain:
  """Returns the progress of a row.

  Args:
    name: name of the row.
    row: row of a study.
    workdir: workdir of the study.
    extra_flags: flags that are added to the runs.
    weights: path of weights that replace the pre-trainings.
  """
  folder = grid.directory(name)
  if weights is not None:
    starts = {'given': weights}
    pretrain = Progress([], [], True)
  elif row.pretrain is None:
    starts, pretrain = {}, Progress([], [], False)
  else:
    pretrain = stages.of_runs(pretrainings(name, row, workdir, extra_flags))
    starts = {
      f'from-seed={run.seed}': _start(run, row.early_stopping)
      for run, value in pretrain.scores
      if math.isfinite(value)  # weights of a diverged run are not transferred
    }
  transfers = {
    key: _join(
      [
        _transfer(f'{folder}/{start}', row, key, workdir, extra_flags.all, path)
        for start, path in starts.items()
      ],
      pretrain.complete,
    )
    for key in row.transfers
  }
  return Chain(pretrain, transfers, row.derived)


def _derived(derived: Derived, spreads: Sequence[Spread]) -> Spread | None:
  """Returns the value of a derived column; None if a transfer has no runs.

  Args:
    derived: definition of the column.
    spreads: value of each transfer in `derived.of` that has runs.
  """
  if len(spreads) < len(derived.of):
    return None
  means = [spread.mean for spread in spreads]
  value = -math.inf  # as for a single run that diverged
  if all(map(math.isfinite, means)):
    value = derived.function(dict(zip(derived.of, means, strict=True)))
  return Spread(value, math.nan, len(means))


def pretrainings(
  name: str, row: Row, workdir: str, extra_flags: ExtraFlags
) -> list[Run]:
  """Returns the pre-trainings of a row, one for each seed.

  Args:
    name: name of the row.
    row: row of a study; without a pre-training, the list is empty.
    workdir: workdir of the study.
    extra_flags: flags that are added to the runs.
  """
  if row.pretrain is None:
    return []
  task = Task(command='train', final=row.pretrain)
  flags = [*extra_flags.all, *extra_flags.pretrain]
  folder = f'{grid.directory(name)}/pretrain'
  return grid.runs(folder, task, FINAL, workdir, flags, {})


def num_runs(row: Row, pretrained: bool) -> int:
  """Returns the number of all runs of a row.

  It includes runs that can only be listed when earlier runs have finished.

  Args:
    row: row of a study.
    pretrained: whether weights are given instead of the pre-trainings.
  """
  if pretrained:
    starts = 1
  elif row.pretrain is None:  # the row is left out
    return 0
  else:
    starts = len(row.pretrain.seeds)
  transfers = row.transfers.values()
  # Columns with the same directory share one evaluation.
  evaluations = {_directory(t) for t in transfers if isinstance(t, Evaluation)}
  tasks = sum(t.num_runs for t in transfers if isinstance(t, Task))
  num_transfers = starts * (len(evaluations) + tasks)
  return num_transfers if pretrained else starts + num_transfers


def _start(run: Run, early_stopping: bool) -> str:
  """Returns the path of a finished pre-training's weights for transfers."""
  if not early_stopping:
    return run.workdir
  return f'{run.workdir}/checkpoints/{jobs.best_step(run)}'


def _join(parts: Sequence[Progress], complete: bool) -> Progress:
  """Joins the progress of the transfers of several pre-trainings.

  Args:
    parts: progress of the transfers of each pre-training.
    complete: whether all pre-trainings are finished, so that no more parts
      will be added.
  """
  runs = [run for part in parts for run in part.runs]
  scores = [score for part in parts for score in part.scores]
  done = complete and all(part.complete for part in parts)
  return Progress(runs, scores, done)


def _transfer(
  start: str,
  row: Row,
  key: str,
  workdir: str,
  flags: Sequence[str],
  path: str,
) -> Progress:
  """Returns the progress of a transfer of one pre-training's weights.

  Args:
    start: name of the directory for transfers of these weights.
    row: row of a study.
    key: key of the transfer in `row.transfers`.
    workdir: workdir of the study.
    flags: flags that are added to the runs.
    path: path of the weights.
  """
  transfer = row.transfers[key]
  if isinstance(transfer, Evaluation):
    return stages.of_runs([_evaluation(start, transfer, workdir, flags, path)])
  flags = [*flags, f'--config.init_from={path}']
  if isinstance(transfer, Task):
    return stages.of_task(
      f'{start}/{grid.directory(key)}', transfer, workdir, flags
    )
  # Another metric of a task is read from the runs in the task's directory.
  task = row.transfers[transfer.of]
  assert isinstance(task, Task)
  final = task.final._replace(metric=transfer.metric)
  task = dataclasses.replace(task, final=final)
  found = stages.of_task(
    f'{start}/{grid.directory(transfer.of)}', task, workdir, flags
  )
  return found._replace(
    runs=[run for run in found.runs if run.stage == FINAL],
    scores=[score for score in found.scores if score.run.stage == FINAL],
  )


def _evaluation(
  name: str,
  evaluation: Evaluation,
  workdir: str,
  extra_flags: Sequence[str],
  path: str,
) -> Run:
  """Returns the run that evaluates the weights at a path."""
  name += f'/{_directory(evaluation)}'
  run_dir = f'{workdir}/{name}'
  flags = [f'--checkpoint={path}', f'--evaluator={evaluation.evaluator}']
  flags += [f'--dataset={evaluation.dataset}'] if evaluation.dataset else []
  flags += [f'--split={evaluation.split}', f'--out={jobs.result_file(run_dir)}']
  flags += [
    f'--config.{key}={value}' for key, value in evaluation.flags.items()
  ]
  flags += [flag for flag in extra_flags if _DATA_FLAG.match(flag)]
  return Run(name, FINAL, {}, 0, 'evaluate', flags, evaluation.metric, run_dir)


def _directory(evaluation: Evaluation) -> str:
  """Returns the directory of an evaluation, the same for all its metrics."""
  content = json.dumps(evaluation._replace(metric=''), default=str).encode()
  return f'{evaluation.evaluator}-{zlib.crc32(content):08x}'
