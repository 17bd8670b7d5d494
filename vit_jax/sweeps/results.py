"""Selects the best setting of a sweep, and formats its tables."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.sweeps import jobs
from vit_jax.sweeps.grid import DEV, FINAL, Run, Sweep, Task


class Score(NamedTuple):
  """A run and its metric in [0, 1], or -inf if the run diverged."""

  run: Run
  value: float


class Spread(NamedTuple):
  """Mean and sample standard deviation of `count` values.

  The standard deviation of a single value is NaN.
  """

  mean: float
  std: float
  count: int

  @classmethod
  def of(cls, values: Sequence[float]) -> 'Spread':
    """Summarises one or more values; -inf is the value of a diverged run."""
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
  """Returns each setting and the spread over its seeds, in grid order."""
  found: list[tuple[dict, list[float]]] = []
  for score in scores:
    # Settings are dicts, which cannot be keys.
    values = next((v for s, v in found if s == score.run.setting), None)
    if values is None:
      found.append((score.run.setting, [score.value]))
    else:
      values.append(score.value)
  return [(setting, Spread.of(values)) for setting, values in found]


def best(scores: Sequence[Score]) -> dict[str, Any]:
  """Returns the setting with the highest mean over seeds."""
  return max(by_setting(scores), key=lambda pair: pair[1].mean)[0]


def table(sweep: Sweep, scores: Mapping[str, Sequence[Score]]) -> str:
  """Formats the results of a sweep as Markdown.

  For each task, the table has the selected setting, its results on the dev and
  the test split, and published results. The results of all settings follow.

  Args:
    sweep: sweep of a config.
    scores: scores of the finished runs of each task.
  """
  head = ['task', 'chosen', 'dev', 'test', 'runs', *sweep.published]
  lines = [
    f'# {sweep.title}',
    '',
    'Mean ± sample standard deviation over seeds, %.',
    '',
    _line(head),
    '|---' * len(head) + '|',
  ]
  for name in sweep.tasks:
    published = [
      f'{values[name]:g}' if name in values else ''
      for values in sweep.published.values()
    ]
    lines.append(_line([*_cells(name, scores.get(name, ())), *published]))
  lines += _groups(sweep, scores)
  dev = [_dev_table(n, scores[n]) for n in sweep.tasks if n in scores]
  return '\n'.join([*lines, *(row for rows in dev for row in rows), ''])


def _values(scores: Sequence[Score], stage: str) -> list[float]:
  return [score.value for score in scores if score.run.stage == stage]


def _cells(name: str, scores: Sequence[Score]) -> list[str]:
  """Formats the measured results of a task as cells of the table."""
  final = [score for score in scores if score.run.stage == FINAL]
  if not final:
    return [name, '', '', 'not finished', '']
  setting = final[0].run.setting
  dev = [s for s in scores if s.run.stage == DEV and s.run.setting == setting]
  dev_spread = str(Spread.of(_values(dev, DEV))) if dev else ''
  test = Spread.of(_values(final, FINAL))
  return [name, _text(setting), dev_spread, str(test), str(test.count)]


def _groups(sweep: Sweep, scores: Mapping[str, Sequence[Score]]) -> list[str]:
  """Formats rows with the means over each group of tasks and over all."""
  measured = {
    name: Spread.of(final).mean
    for name in sweep.tasks
    if (final := _values(scores.get(name, ()), FINAL))
  }
  published = [
    {name: value / 100 for name, value in column.items()}
    for column in sweep.published.values()
  ]
  names_of: dict[str, list[str]] = {}
  for name, task in sweep.tasks.items():
    names_of.setdefault(task.group, []).append(name)
  groups = names_of if len(names_of) > 1 else {}
  if len(sweep.tasks) > 1:
    groups = groups | {'mean': [*sweep.tasks]}
  rows = []
  for title, names in groups.items():
    mean, *others = (_mean(column, names) for column in (measured, *published))
    if mean or any(others):
      rows.append(
        _line([f'**{title}** ({len(names)})', '', '', mean, '', *others])
      )
  return rows


def _mean(values: Mapping[str, float], names: Sequence[str]) -> str:
  """Formats the mean over some tasks in percent; '' if a value is missing."""
  if not all(name in values for name in names):
    return ''
  mean = math.fsum(values[name] for name in names) / len(names)
  return str(Spread(mean, math.nan, len(names)))


def _line(cells: Sequence[str]) -> str:
  """Formats a line of a Markdown table."""
  return f'|{"|".join(f" {cell} " if cell else " " for cell in cells)}|'


def _dev_table(name: str, scores: Sequence[Score]) -> list[str]:
  """Formats the dev results of all settings of a task as a table."""
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
  """Returns CSV with one line per finished run."""
  keys = list(
    dict.fromkeys(key for task in tasks.values() for key in task.grid)
  )
  out = io.StringIO()
  head = ['task', 'group', 'stage', *keys, 'seed']
  head += ['metric', 'split', 'value', 'workdir']
  writer = csv.writer(out, lineterminator='\n')
  writer.writerow(head)
  for name, task_scores in scores.items():
    for run, value in task_scores:
      setting = [run.setting.get(key, '') for key in keys]
      writer.writerow(
        [name, tasks[name].group, run.stage, *setting, run.seed]
        + [run.metric, jobs.split(run), value, run.workdir]
      )
  return out.getvalue()
