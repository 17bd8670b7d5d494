"""A row's runs: a transfer starts when its pre-training is finished."""

import json
import math
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.study.contents import UPSTREAM, Judging, Row
from vit_jax.sweeps import grid, jobs, stages
from vit_jax.sweeps.grid import FINAL, Run, Task
from vit_jax.sweeps.results import Spread
from vit_jax.sweeps.stages import Standing

_EVALUATED = re.compile(r'--?config\.(source|reader)\.')  # what evaluate takes


class Given(NamedTuple):
  """What the command line adds to the runs.

  Attributes:
    pretrain: '--config.KEY=value' for pre-trainings alone.
    all: the same for all runs; for evaluations those of source and reader.
  """

  pretrain: Sequence[str] = ()
  all: Sequence[str] = ()


class Chain(NamedTuple):
  """Where a row stands.

  Attributes:
    pretrain: its pre-trainings; none if weights are given.
    transfers: transfers from all pre-trainings, by their names in
      `Row.transfers`.
  """

  pretrain: Standing
  transfers: dict[str, Standing]

  @property
  def standings(self) -> list[Standing]:
    """Returns the progress of the pre-training and of each transfer."""
    return [self.pretrain, *self.transfers.values()]

  def spread(self, column: str) -> Spread | None:
    """Returns the column's value, or None if a run is not finished."""
    if column == UPSTREAM:
      found = [self.pretrain]
    else:
      found = [
        each
        for name, each in self.transfers.items()
        if name.partition('/')[0] == column
      ]
    if not self.pretrain.complete or not all(each.complete for each in found):
      return None
    spreads = [
      Spread.of(values)
      for each in found
      if (values := [s.value for s in each.scores if s.run.stage == FINAL])
    ]
    if len(spreads) < 2 or len(spreads) < len(found):
      return spreads[0] if spreads else None
    mean = math.fsum(spread.mean for spread in spreads) / len(spreads)
    return Spread(mean, math.nan, len(spreads))


def of_row(
  name: str, row: Row, workdir: str, given: Given, weights: str | None = None
) -> Chain:
  """Returns the progress of a row.

  Args:
    name: name of the row.
    row: the row.
    workdir: workdir of the study.
    given: flags for all rows.
    weights: path of weights that replace the pre-trainings.
  """
  place = grid.directory(name)
  if weights is not None:
    starts = {'given': weights}
    pretrain = Standing([], [], True)
  else:
    task = Task(command='train', final=row.pretrain)
    flags = [*given.all, *given.pretrain]
    pretrain = stages.of_task(f'{place}/pretrain', task, workdir, flags)
    starts = {
      f'from-seed={run.seed}': _start(run, row.early_stopping)
      for run, value in pretrain.scores
      if math.isfinite(value)  # nothing starts from one that diverged
    }
  transfers = {
    key: _joined(
      [
        _transfer(f'{place}/{start}', key, each, workdir, given.all, path)
        for start, path in starts.items()
      ],
      pretrain.complete,
    )
    for key, each in row.transfers.items()
  }
  return Chain(pretrain, transfers)


def _start(run: Run, early_stopping: bool) -> str:
  """Returns the path of the weights that a finished pre-training transfers."""
  if not early_stopping:
    return run.workdir
  return f'{run.workdir}/checkpoints/{jobs.best_step(run)}'


def _joined(parts: Sequence[Standing], complete: bool) -> Standing:
  """Several as one; complete says whether there will be no more of them."""
  runs = [run for part in parts for run in part.runs]
  scores = [score for part in parts for score in part.scores]
  done = complete and all(part.complete for part in parts)
  return Standing(runs, scores, done)


def _transfer(
  start: str,
  key: str,
  what: Task | Judging,
  workdir: str,
  flags: Sequence[str],
  path: str,
) -> Standing:
  """Returns the progress of a transfer from the weights of a path."""
  if isinstance(what, Task):
    own = [*flags, f'--config.init_from={path}']
    return stages.of_task(f'{start}/{grid.directory(key)}', what, workdir, own)
  return stages.of_runs([_evaluation(start, what, workdir, flags, path)])


def _evaluation(
  name: str, what: Judging, workdir: str, given: Sequence[str], path: str
) -> Run:
  """Returns the run that evaluates the weights of a path."""
  asked = json.dumps(what._replace(metric=''), default=str).encode()
  name += f'/{what.evaluator}-{zlib.crc32(asked):08x}'
  place = f'{workdir}/{name}'
  flags = [f'--checkpoint={path}', f'--evaluator={what.evaluator}']
  flags += [f'--dataset={what.dataset}'] if what.dataset else []
  flags += [f'--split={what.split}', f'--out={jobs.result_file(place)}']
  flags += [f'--config.{key}={value}' for key, value in what.flags.items()]
  flags += [flag for flag in given if _EVALUATED.match(flag)]
  return Run(name, FINAL, {}, 0, 'evaluate', flags, what.metric, place)
