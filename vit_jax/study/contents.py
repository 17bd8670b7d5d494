"""What a study is made of.

A study's file, `configs/studies/NAME.py`, defines `get_study(argument)`, which
returns a `Study`; an argument comes after a colon as in other configs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import loading
from vit_jax.errors import UserError, closest
from vit_jax.sweeps.grid import Stage, Task

UPSTREAM = 'pre-training'  # the column of pre-trainings' own metric
AXES = {
  'images': 'images of the pre-training set',
  'epochs': 'epochs of pre-training',
  'exaflops': 'exaFLOPs of pre-training',
  'core_days': 'core-days of pre-training',
}


class Judging(NamedTuple):
  """An evaluation of weights as they are, by the command `evaluate`.

  Attributes:
    evaluator: kind of the evaluator: 'fewshot'.
    metric: metric of its result; 'ema/5shot' for averaged weights. Columns that
      differ only in the metric share one evaluation.
    split: the evaluated split.
    dataset: TFDS name; None for the data of the pre-training.
    flags: {'evals.fewshot.train_split': …}, keys with other values.
  """

  evaluator: str
  metric: str
  split: str
  dataset: str | None = None
  flags: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A pre-training, and what becomes of its weights.

  Attributes:
    pretrain: config and seeds; its metric is the column `UPSTREAM`.
    transfers: by column. Several of one column, 'VTAB-1k/dtd' and so on, are
      averaged.
    paper: the published number of a column, in %.
    lines: lines of the figure, which join rows; each row has its own by
      default.
    place: on the figure's x axis: how many images, or the published cost, which
      serves where weights are taken in place of training.
    early_stopping: transfers start from the checkpoint that the pre-training's
      metric is best at, in place of the last.
  """

  pretrain: Stage
  transfers: Mapping[str, Task | Judging] = dataclasses.field(
    default_factory=dict
  )
  paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
  lines: Sequence[str] = ()
  place: float | None = None
  early_stopping: bool = False

  def __post_init__(self):
    for name in self.paper:
      if name not in self.columns:
        raise UserError(
          f'paper has a number of {name!r}, and no transfer is called so; '
          f'{closest(name, self.columns)}.'
        )

  @property
  def columns(self) -> list[str]:
    """The columns of the table, in order."""
    names = (key.partition('/')[0] for key in self.transfers)
    return [UPSTREAM, *dict.fromkeys(names)]


class Figure(NamedTuple):
  """What is drawn: a panel for each column, a line for each model.

  Attributes:
    x: key of `AXES`. Over 'epochs' the course of pre-trainings is drawn.
    columns: the y axes; over 'epochs' metrics of pre-trainings.
  """

  x: str
  columns: Sequence[str] = (UPSTREAM,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """Rows by name, what their table is headed by, and its figure."""

  title: str
  rows: Mapping[str, Row]
  note: str = ''
  figure: Figure | None = None

  def __post_init__(self):
    if not self.rows:
      raise UserError(f'the study {self.title!r} has no rows: give some.')
    if self.figure is not None and self.figure.x not in AXES:
      raise UserError(
        f'the figure has x={self.figure.x!r}; {closest(self.figure.x, AXES)}.'
      )

  @property
  def columns(self) -> list[str]:
    """The columns of all rows of the table, in order."""
    return [
      *dict.fromkeys(c for row in self.rows.values() for c in row.columns)
    ]


def load(path_and_argument: str) -> Study:
  """Loads the study of a file; see `loading.held`."""
  example = 'configs/studies/cifar10.py'
  return loading.held(path_and_argument, 'get_study', Study, example)
