"""Defines studies: rows, transfers, published numbers, figures.

The file of a study, `configs/studies/NAME.py`, defines `get_study(argument)`,
which returns a `Study`. The argument is the text after a colon, as in
--config=configs/studies/NAME.py:ARGUMENT.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import loading
from vit_jax.errors import UserError, closest
from vit_jax.sweeps.grid import Stage, Task

UPSTREAM = 'pre-training'  # column of the metric of the pre-trainings
AXES = {
  'images': 'images of the pre-training set',
  'epochs': 'epochs of pre-training',
  'exaflops': 'exaFLOPs of pre-training',
  'core_days': 'core-days of pre-training',
  'images_per_second': 'images per second and core in inference',
}
# Axes on which the position of a row is `Row.place`; on the others, it is
# measured.
GIVEN_AXES = ('images', 'images_per_second')


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


class OtherMetric(NamedTuple):
  """A column with another metric of the runs of a transfer.

  Attributes:
    of: key of the transfer in `Row.transfers`, whose value is a `Task`.
    metric: metric of the last step of its runs, for example 'real/accuracy'.
  """

  of: str
  metric: str


Transfer = Task | Evaluation | OtherMetric


class Derived(NamedTuple):
  """A column whose value is computed from those of several transfers.

  Attributes:
    of: keys of the transfers in `Row.transfers`.
    function: function from {key: mean over the runs of the transfer}, fractions
      as in metrics.jsonl, to the value of the column, which is shown in %.
  """

  of: Sequence[str]
  function: Callable[[Mapping[str, float]], float]


class Number(NamedTuple):
  """A published number and its standard deviation, in %."""

  mean: float
  std: float | None = None

  def __str__(self) -> str:
    return f'{self.mean:g}' + ('' if self.std is None else f' ± {self.std:g}')


class Published(NamedTuple):
  """Published numbers of a model that the study does not train.

  Attributes:
    paper: numbers by column.
    lines: lines of the figure that the model belongs to.
    place: position on the x axis of the figure; None if the model is not drawn.
  """

  paper: Mapping[str, Number]
  lines: Sequence[str] = ()
  place: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A pre-training, and the transfers of its weights.

  Attributes:
    pretrain: config and seeds of the pre-training; its metric is the column
      `UPSTREAM`. None if --weights must specify the weights.
    transfers: transfers by column, or by 'COLUMN/NAME'. The transfers of a
      column, for example 'VTAB-1k/dtd' and 'VTAB-1k/svhn', are averaged.
    derived: columns that are computed from the transfers, by column.
    paper: published numbers by column.
    lines: lines of the figure that contain the row; by default, a separate line
      with the name of the row.
    place: position on the x axis of the figure: the number of images, the
      images per second of inference, or the published cost of the pre-training.
      The row's own results use this cost only if its weights are given instead
      of trained.
    early_stopping: whether transfers start from the checkpoint with the best
      metric of the pre-training instead of the last one.
  """

  pretrain: Stage | None
  transfers: Mapping[str, Transfer] = dataclasses.field(default_factory=dict)
  derived: Mapping[str, Derived] = dataclasses.field(default_factory=dict)
  paper: Mapping[str, Number] = dataclasses.field(default_factory=dict)
  lines: Sequence[str] = ()
  place: float | None = None
  early_stopping: bool = False

  def __post_init__(self):
    for transfer in self.transfers.values():
      if isinstance(transfer, OtherMetric) and not isinstance(
        self.transfers.get(transfer.of), Task
      ):
        raise UserError(
          f'{transfer.metric!r} must be another metric of a task, but '
          f'{transfer.of!r} is not a task; '
          f'{closest(transfer.of, self.transfers)}.'
        )
    for column, derived in self.derived.items():
      for key in derived.of:
        if key not in self.transfers:
          raise UserError(
            f'the column {column!r} is derived from {key!r}, which is not a '
            f'transfer; {closest(key, self.transfers)}.'
          )
    for name in self.paper:
      if name not in self.columns:
        raise UserError(
          f'paper has a number for {name!r}, which is not a column; '
          f'{closest(name, self.columns)}.'
        )

  @property
  def columns(self) -> list[str]:
    """Returns the columns of the table, in order."""
    names = (key.partition('/')[0] for key in self.transfers)
    return [UPSTREAM, *dict.fromkeys([*names, *self.derived])]


class Figure(NamedTuple):
  """Figure with a panel for each column and a line for each model.

  Attributes:
    x: key of `AXES`. With 'epochs', the curves of pre-trainings are drawn.
    columns: columns of the y axes; with 'epochs', metrics of pre-trainings.
  """

  x: str
  columns: Sequence[str] = (UPSTREAM,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """A table of pre-trainings and transfers, with an optional figure.

  Attributes:
    title: title of the table.
    rows: rows by name.
    published: published models for table and figure that the study does not
      train, by name.
    note: text below the title.
    figure: definition of the figure; None for no figure.
  """

  title: str
  rows: Mapping[str, Row]
  published: Mapping[str, Published] = dataclasses.field(default_factory=dict)
  note: str = ''
  figure: Figure | None = None

  def __post_init__(self):
    if not self.rows:
      raise UserError(
        f'the study {self.title!r} has no rows; give at least one.'
      )
    if self.figure is not None and self.figure.x not in AXES:
      raise UserError(
        f'the x axis of the figure is {self.figure.x!r}; '
        f'{closest(self.figure.x, AXES)}.'
      )

  @property
  def columns(self) -> list[str]:
    """Returns the columns of all rows of the table, in order."""
    return [
      *dict.fromkeys(c for row in self.rows.values() for c in row.columns)
    ]


def load(path_and_argument: str) -> Study:
  """Loads the study of a file; see `loading.call_typed`."""
  example = 'configs/studies/cifar10.py'
  return loading.call_typed(path_and_argument, 'get_study', Study, example)
