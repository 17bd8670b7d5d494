"""Defines sweeps, and lists the runs of a sweep.

The file of a sweep, `configs/sweeps/NAME.py`, defines `get_sweep(argument)`,
which returns a `Sweep`. The argument is the text after a colon, as in
--config=configs/sweeps/NAME.py:ARGUMENT.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import loading
from vit_jax.errors import UserError, check_choice

DEV, FINAL = 'dev', 'final'
COMMANDS = ('train', 'finetune')


class Stage(NamedTuple):
  """Runs that differ only in the setting and the seed.

  Attributes:
    config: path of the config, with its argument, for example
      'configs/finetune.py:data=dtd,dev=1'.
    metric: metric to compare, at the last step; higher is better.
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
    check_choice('command', self.command, COMMANDS)
    if not all(len(values) for values in self.grid.values()):
      raise UserError(
        f'grid is {dict(self.grid)}; give at least one value for each key.'
      )
    if self.dev is None and len(self.settings) > 1:
      raise UserError(
        f'grid has {len(self.settings)} settings, but dev is None, so the best '
        'one cannot be selected. Give a dev stage, or only one setting.'
      )
    for stage in filter(None, (self.dev, self.final)):
      if not stage.seeds:
        raise UserError(
          f'{stage.config}: seeds is empty; give one seed or more.'
        )

  @property
  def settings(self) -> list[dict[str, Any]]:
    """Returns all settings in order; without a grid, one empty setting."""
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


class Run(NamedTuple):
  """One run of the command train, finetune or evaluate.

  Attributes:
    task: name of the task.
    stage: 'dev' or 'final'.
    setting: setting of the grid.
    seed: seed of the run.
    command: 'train', 'finetune' or 'evaluate'.
    flags: all flags of the command, including the workdir.
    metric: metric to compare.
    workdir: workdir of the run.
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
    """Returns the name for messages and tables."""
    return f'{self.task}/{self.stage}/{label(self.setting, self.seed)}'


def label(setting: Mapping[str, Any], seed: int) -> str:
  """Returns a run's directory name: 'schedule.base_lr=0.003,seed=0'."""
  parts = [f'{key}={value}' for key, value in {**setting, 'seed': seed}.items()]
  return directory(','.join(parts))


def directory(name: str) -> str:
  """Returns a name with '-' for slashes and characters special to shells."""
  return name.translate(str.maketrans({sign: '-' for sign in '/[]*?() '}))


def runs(
  name: str,
  task: Task,
  stage: str,
  workdir: str,
  extra_flags: Sequence[str],
  chosen: Mapping[str, Any] | None = None,
) -> list[Run]:
  """Returns the runs of a stage of a task.

  Args:
    name: name of the task.
    task: task of the sweep.
    stage: 'dev' or 'final'.
    workdir: workdir of the sweep.
    extra_flags: flags '--config.KEY=value' that are added to all runs.
    chosen: the only setting to run; None for all settings of the grid.
  """
  definition = task.dev if stage == DEV else task.final
  assert definition is not None
  found = []
  for setting in task.settings if chosen is None else [dict(chosen)]:
    for seed in definition.seeds:
      run_dir = f'{workdir}/{name}/{stage}/{label(setting, seed)}'
      keys = {**definition.flags, **setting, 'seed': seed}
      flags = [f'--config={definition.config}', f'--workdir={run_dir}']
      flags += [f'--config.{key}={value}' for key, value in keys.items()]
      found.append(
        Run(
          task=name,
          stage=stage,
          setting=setting,
          seed=seed,
          command=task.command,
          flags=[*flags, *extra_flags],
          metric=definition.metric,
          workdir=run_dir,
        )
      )
  return found


def load(path_and_argument: str) -> Sweep:
  """Loads the sweep of a file; see `loading.call_typed`."""
  example = 'configs/sweeps/digits.py'
  return loading.call_typed(path_and_argument, 'get_sweep', Sweep, example)
