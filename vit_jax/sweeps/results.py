"""The best setting of a sweep, and the tables of its results."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.sweeps import jobs
from vit_jax.sweeps.grid import DEV, FINAL, Run, Sweep, Task


class Score(NamedTuple):
  """A run and its metric in [0, 1]; -inf if the run diverged."""

  run: Run
  value: float


class Spread(NamedTuple):
  """Mean and sample standard deviation; the latter is NaN for one value."""

  mean: float
  std: float
  count: int

  @classmethod
  def of(cls, values: Sequence[float]) -> 'Spread':
    """Summarises one value or more; -inf stands for a run that diverged."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2 or not math.isfinite(mean):
      return cls(mean, math.nan, len(values))
    return cls(mean, statistics.stdev(values), len(values))

  def __str__(self) -> str:
    """Formats the spread in percent: '97.12 ± 0.31'."""
    if not math.isfinite(self.mean):
      return 'diverged'
    if math.isnan(self.std):
      return f'{100 * self.mean:.2f}'
    return f'{100 * self.mean:.2f} ± {100 * self.std:.2f}'


def by_setting(scores: Sequence[Score]) -> list[tuple[dict, Spread]]:
  """Returns each setting and its values over seeds, in grid order."""
  found: list[tuple[dict, list[float]]] = []
  for score in scores:
    at = next((v for s, v in found if s == score.run.setting), None)
    if at is None:
      found.append((score.run.setting, [score.value]))
    else:
      at.append(score.value)
  return [(setting, Spread.of(values)) for setting, values in found]


def best(scores: Sequence[Score]) -> dict[str, Any]:
  """Returns the setting with the highest mean over seeds."""
  return max(by_setting(scores), key=lambda pair: pair[1].mean)[0]


def table(sweep: Sweep, scores: Mapping[str, Sequence[Score]]) -> str:
  """Formats settings, choices and final results as Markdown.

  Args:
    sweep: the sweep.
    scores: scores of the finished runs of each task.
  """
  lines = [
    f'# {sweep.title}',
    '',
    'Mean ± sample standard deviation over seeds, %.',
    '',
    '| task | chosen | dev | test | runs |',
    '|---|---|---|---|---|',
  ]
  means: dict[str, list[float]] = {}
  for name, task in sweep.tasks.items():
    final = _values(scores.get(name, ()), FINAL)
    lines.append(_row(name, scores.get(name, ())))
    if final:
      means.setdefault(task.group, []).append(Spread.of(final).mean)
  lines += _groups(sweep.tasks, means)
  tried = [_tried(n, scores[n]) for n in sweep.tasks if n in scores]
  return '\n'.join([*lines, *(row for rows in tried for row in rows), ''])


def _values(scores: Sequence[Score], stage: str) -> list[float]:
  return [score.value for score in scores if score.run.stage == stage]


def _row(name: str, scores: Sequence[Score]) -> str:
  """Formats a task's line of the table."""
  final = [score for score in scores if score.run.stage == FINAL]
  if not final:
    return f'| {name} | | | not finished | |'
  setting = final[0].run.setting
  dev = [s for s in scores if s.run.stage == DEV and s.run.setting == setting]
  dev_spread = Spread.of(_values(dev, DEV)) if dev else ''
  test = Spread.of(_values(final, FINAL))
  return f'| {name} | {_text(setting)} | {dev_spread} | {test} | {test.count} |'


def _groups(
  tasks: Mapping[str, Task], means: Mapping[str, list[float]]
) -> list[str]:
  """Formats the means over tasks: of each complete group, and of all tasks."""
  groups = dict.fromkeys(task.group for task in tasks.values())
  rows = []
  for group in groups if len(groups) > 1 else ():
    size = sum(task.group == group for task in tasks.values())
    if len(means.get(group, ())) == size:
      mean = Spread(math.fsum(means[group]) / size, math.nan, size)
      rows.append(f'| **{group}** ({size}) | | | {mean} | |')
  every = [value for values in means.values() for value in values]
  if len(every) == len(tasks) > 1:
    mean = Spread(math.fsum(every) / len(every), math.nan, len(every))
    rows.append(f'| **mean** ({len(every)}) | | | {mean} | |')
  return rows


def _tried(name: str, scores: Sequence[Score]) -> list[str]:
  """Formats all settings of a task that were compared."""
  dev = by_setting([score for score in scores if score.run.stage == DEV])
  if not dev:
    return []
  rows = [f'| {_text(setting)} | {spread} |' for setting, spread in dev]
  return ['', f'{name}:', '', '| setting | dev |', '|---|---|', *rows]


def _text(setting: Mapping[str, Any]) -> str:
  return ', '.join(f'{k} {v}' for k, v in setting.items()) or 'as it is'


def rows(
  scores: Mapping[str, Sequence[Score]], tasks: Mapping[str, Task]
) -> str:
  """Returns CSV with one line per run, and the split of its metric."""
  keys = list(
    dict.fromkeys(key for task in tasks.values() for key in task.grid)
  )
  out = io.StringIO()
  head = ['task', 'group', 'stage', *keys, 'seed']
  head += ['metric', 'split', 'value', 'workdir']
  writer = csv.writer(out, lineterminator='\n')
  writer.writerow(head)
  for name, each in scores.items():
    for run, value in each:
      setting = [run.setting.get(key, '') for key in keys]
      writer.writerow(
        [name, tasks[name].group, run.stage, *setting, run.seed]
        + [run.metric, jobs.split(run), value, run.workdir]
      )
  return out.getvalue()
