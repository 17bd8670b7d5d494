"""Defines the content of sweeps and studies.

The file of a sweep, `configs/sweeps/NAME.py`, defines `get_sweep(argument)`,
which returns a `Sweep`: tasks, each with a grid of settings. The file of a
study, `configs/studies/NAME.py`, defines `get_study(argument)`, which returns a
`Study`: rows, each with a pre-training and transfers of its weights. The
argument is the text after a colon, as in
--config=configs/sweeps/NAME.py:ARGUMENT.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from vit_jax.config import loading
from vit_jax.errors import UserError, check_choice

T = TypeVar('T')
DEV, FINAL = 'dev', 'final'
UPSTREAM = 'pre-training'  # column of the metric of the pre-trainings


class Stage(NamedTuple):
  """Runs that differ only in the setting and the seed.

  Attributes:
    config: path of the config, with its argument, for example
      'configs/finetune.py:data=dtd,dev=1'.
    metric: metric to compare, at the last step. Its evaluator specifies whether
      higher or lower values are better; lower ones of 'loss' are.
    flags: values that replace those of the config, by key:
      {'train.split': …}.
    seeds: seeds of the runs.
  """

  config: str
  metric: str
  flags: Mapping[str, Any] = {}
  seeds: Sequence[int] = (0,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A task, for example a data set, and the settings to choose from.

  Attributes:
    command: 'train' or 'finetune'.
    final: final stage: training on the whole train split, evaluation on the
      test split.
    dev: dev stage: training on a part of the train split, evaluation on the
      rest of it; None if the grid has only one setting.
    grid: values by key: {'schedule.base_lr': (.001, .003), …}; a setting
      consists of one value for each key.
    group: name of the group of tasks whose results are averaged.
  """

  command: str
  final: Stage
  dev: Stage | None = None
  grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
  group: str = ''

  def __post_init__(self):
    stages = [self.final] if self.dev is None else [self.dev, self.final]
    seeds = [[*stage.seeds] for stage in stages]
    if not self.settings or not all(seeds):
      raise UserError(
        f'{self.final.config}: grid is {dict(self.grid)} and seeds are '
        f'{seeds}; all need at least one value.'
      )
    if self.dev is None and len(self.settings) > 1:
      raise UserError(
        f'a grid of {len(self.settings)} settings needs a stage dev, not None.'
      )

  @property
  def settings(self) -> list[dict[str, Any]]:
    """Returns all settings in order; without a grid, one empty setting."""
    return [
      dict(zip(self.grid, values, strict=True))
      for values in itertools.product(*self.grid.values())
    ]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Tasks of a sweep, and published results to compare with.

  Attributes:
    title: title of the table.
    tasks: tasks by name.
    published: published results in %, as {column of the table: {task: result}}.
  """

  title: str
  tasks: Mapping[str, Task]
  published: Mapping[str, Mapping[str, float]] = dataclasses.field(
    default_factory=dict
  )


class Evaluation(NamedTuple):
  """An evaluation of weights by the command `evaluate`, without training.

  Attributes:
    evaluator: kind of the evaluator, for example 'fewshot'.
    metric: metric of the result, for example '5shot', or 'ema/5shot' for
      averaged weights. Columns that differ only in the metric share one
      evaluation.
    split: split to evaluate on.
    dataset: TFDS name; None for the data of the pre-training.
    flags: values that replace those of the config, by key:
      {'evals.fewshot.train_split': …}.
  """

  evaluator: str
  metric: str
  split: str
  dataset: str | None = None
  flags: Mapping[str, Any] = {}


Transfer = Task | Evaluation


class Number(NamedTuple):
  """A published number and its standard deviation, in %."""

  mean: float
  std: float | None = None

  def __str__(self) -> str:
    return f'{self.mean:g}' + ('' if self.std is None else f' ± {self.std:g}')


class Branch(NamedTuple):
  """A step of another row's pre-training, see `train --branch_from`.

  Attributes:
    row: name of the other row, which stands before this one.
    step: number of its updates.
  """

  row: str
  step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A pre-training, and the transfers of its weights.

  Attributes:
    pretrain: config and seeds of the pre-training; its metric is the column
      `UPSTREAM`. None if --weights must specify the weights.
    branch: the step at which the pre-training begins, with the whole state of
      another row's run; None for a run from the start.
    transfers: transfers by column, or by 'COLUMN/NAME'. The transfers of a
      column, for example 'VTAB-1k/dtd' and 'VTAB-1k/svhn', are averaged.
    paper: published numbers by column.
    early_stopping: whether transfers start from the checkpoint with the best
      metric of the pre-training instead of the last one.
  """

  pretrain: Stage | None
  branch: Branch | None = None
  transfers: Mapping[str, Transfer] = dataclasses.field(default_factory=dict)
  paper: Mapping[str, Number] = dataclasses.field(default_factory=dict)
  early_stopping: bool = False

  def __post_init__(self):
    for column in self.paper:
      check_choice('a column of Row.paper', column, self.columns)

  @property
  def columns(self) -> list[str]:
    """Returns the columns of the table, in order."""
    names = (key.partition('/')[0] for key in self.transfers)
    return [UPSTREAM, *dict.fromkeys(names)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """A table of pre-trainings and transfers.

  Attributes:
    title: title of the table.
    rows: rows by name.
    published: published numbers by column of models that the study does not
      train, by name.
    note: text below the title.
  """

  title: str
  rows: Mapping[str, Row]
  published: Mapping[str, Mapping[str, Number]] = dataclasses.field(
    default_factory=dict
  )
  note: str = ''

  def __post_init__(self):
    earlier: dict[str, Sequence[int]] = {}  # seeds of the rows before
    for name, row in self.rows.items():
      seeds = row.pretrain.seeds if row.pretrain else ()
      if row.branch is not None:
        check_choice(f'Row.branch of {name!r}', row.branch.row, earlier)
        if not {*seeds} <= {*earlier[row.branch.row]}:
          raise UserError(
            f'the seeds of {name!r} are {[*seeds]}, but the run that it '
            f'branches from has {[*earlier[row.branch.row]]}: give it these, '
            'too.'
          )
      if row.pretrain is not None:
        earlier[name] = seeds


def load(path: str, kind: type[T]) -> T:
  """Loads a sweep or study, the result of `get_sweep` or `get_study`.

  Args:
    path: path of the file, with the argument of the function after a colon.
    kind: `Sweep` or `Study`.

  Raises:
    UserError: the file or function does not exist, or the result has another
      type.
  """
  function = f'get_{kind.__name__.lower()}'
  result = loading.call(path, function)
  if not isinstance(result, kind):
    raise UserError(
      f'{function}() of {path} returns {result!r:.100}; it must be a '
      f'{kind.__module__}.{kind.__name__}.'
    )
  return result
