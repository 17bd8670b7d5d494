"""What a sweep is made of, and the runs that follow from it.

A sweep's file, `configs/sweeps/NAME.py`, defines `get_sweep(argument)`, which
returns a `Sweep`; an argument comes after a colon as in other configs.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import loading
from vit_jax.errors import UserError

DEV, FINAL = 'dev', 'final'
COMMANDS = ('train', 'finetune')


class Stage(NamedTuple):
  """Runs that are alike but for the setting and the seed.

  Attributes:
    config: file, with its argument: 'configs/finetune.py:data=dtd,dev=1'.
    metric: by which they are judged, at their last step; higher is better.
    flags: {'train.split': …}, keys of the config with other values.
    seeds: one run each.
  """

  config: str
  metric: str
  flags: Mapping[str, Any] = {}
  seeds: Sequence[int] = (0,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A data set, say, and the settings to choose from for it.

  Attributes:
    command: 'train' or 'finetune'.
    final: trained on everything, and judged on the test split.
    dev: trained on a part, and judged on the rest of it; not needed where the
      grid has one setting.
    grid: {'schedule.base_lr': (.001, .003), …}: a setting is one of each.
    group: tasks with the same are averaged.
  """

  command: str
  final: Stage
  dev: Stage | None = None
  grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
  group: str = ''

  def __post_init__(self):
    if self.command not in COMMANDS:
      raise UserError(
        f'command is {self.command!r}; allowed: {", ".join(COMMANDS)}.'
      )
    if not all(len(values) for values in self.grid.values()):
      raise UserError(f'grid is {dict(self.grid)}: give values for each key.')
    if self.dev is None and len(self.settings) > 1:
      raise UserError(
        f'grid has {len(self.settings)} settings and there is no dev stage to '
        'choose by: give one, or one setting.'
      )
    for stage in filter(None, (self.dev, self.final)):
      if not stage.seeds:
        raise UserError(f'{stage.config}: seeds is empty: give one or more.')

  @property
  def settings(self) -> list[dict[str, Any]]:
    """All of the grid, in order; one empty setting for no grid."""
    return [
      dict(zip(self.grid, values, strict=True))
      for values in itertools.product(*self.grid.values())
    ]

  @property
  def num_runs(self) -> int:
    """Number of runs of both stages."""
    dev = self.dev.seeds if self.dev is not None else ()
    return len(self.settings) * len(dev) + len(self.final.seeds)


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Tasks by name, and what their table is headed by."""

  title: str
  tasks: Mapping[str, Task]


class Run(NamedTuple):
  """One training, or one evaluation.

  Attributes:
    task: its name.
    stage: 'dev' or 'final'.
    setting: of the grid.
    seed: of the training.
    command: 'train', 'finetune' or 'evaluate'.
    flags: of the command, workdir and all.
    metric: by which it is judged.
    workdir: its own.
  """

  task: str
  stage: str
  setting: dict[str, Any]
  seed: int
  command: str
  flags: list[str]
  metric: str
  workdir: str

  @property
  def name(self) -> str:
    """By what people know it."""
    return f'{self.task}/{self.stage}/{label(self.setting, self.seed)}'


def label(setting: Mapping[str, Any], seed: int) -> str:
  """'schedule.base_lr=0.003,seed=0'; the name of a directory."""
  parts = [f'{key}={value}' for key, value in {**setting, 'seed': seed}.items()]
  return directory(','.join(parts))


def directory(name: str) -> str:
  """The name of a directory, which needs no quotes in a shell."""
  return name.translate(str.maketrans({sign: '-' for sign in '/[]*?() '}))


def runs(
  name: str,
  task: Task,
  stage: str,
  workdir: str,
  given: Sequence[str],
  chosen: Mapping[str, Any] | None = None,
) -> list[Run]:
  """The runs of a stage of a task.

  Args:
    name: of the task.
    task: the task.
    stage: 'dev' or 'final'.
    workdir: of the sweep.
    given: '--config.KEY=value' for all of its runs.
    chosen: the setting of the final runs; None for all settings.
  """
  what = task.dev if stage == DEV else task.final
  assert what is not None
  found = []
  for setting in task.settings if chosen is None else [dict(chosen)]:
    for seed in what.seeds:
      place = f'{workdir}/{name}/{stage}/{label(setting, seed)}'
      keys = {**what.flags, **setting, 'seed': seed}
      flags = [f'--config={what.config}', f'--workdir={place}']
      flags += [f'--config.{key}={value}' for key, value in keys.items()]
      found.append(
        Run(
          *(name, stage, setting, seed, task.command),
          *([*flags, *given], what.metric, place),
        )
      )
  return found


def load(path_and_argument: str) -> Sweep:
  """The sweep of a file; see `loading.held`."""
  example = 'configs/sweeps/digits.py'
  return loading.held(path_and_argument, 'get_sweep', Sweep, example)
