"""Formats the tables of sweeps and studies.

Each sweep or study has a Markdown table of measured and published results, and
a CSV file with one line per finished run.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.sweeps import jobs
from vit_jax.sweeps.grid import DEV, FINAL, UPSTREAM, Study, Sweep
from vit_jax.sweeps.jobs import Columns, Graph, Job


class Spread(NamedTuple):
  """Mean and sample standard deviation of several values.

  Attributes:
    mean: mean; -inf if a run diverged.
    std: standard deviation; NaN for a single value.
    percent: whether the values are fractions, which are shown in percent.
  """

  mean: float
  std: float = math.nan
  percent: bool = True

  @classmethod
  def of(cls, values: Sequence[float], percent: bool = True) -> 'Spread':
    """Summarises one or more values; -inf is the value of a diverged run."""
    mean = statistics.fmean(values)
    several = len(values) > 1 and math.isfinite(mean)
    std = statistics.stdev(values) if several else math.nan
    return cls(mean, std, percent)

  def __str__(self) -> str:
    """Formats the spread: '97.12 ± 0.31' in percent, or '2.3026 ± 0.0021'."""
    if not math.isfinite(self.mean):
      return 'diverged'
    scale, digits = (100, 2) if self.percent else (1, 4)
    std = f' ± {scale * self.std:.{digits}f}'
    return (
      f'{scale * self.mean:.{digits}f}{"" if math.isnan(self.std) else std}'
    )


def of_sweep(sweep: Sweep, graph: Graph) -> dict[str, str]:
  """Returns the files of results of a sweep: content by name.

  For each task, the Markdown table has the selected setting, its results on the
  dev and the test split, and published results. The results of all settings
  follow.

  Args:
    sweep: sweep of a config.
    graph: jobs of the sweep.
  """
  rows: list[list[str]] = []  # of the table of tasks
  details: list[str] = []  # lines of the tables of settings
  lines: list[list[Any]] = []  # of the CSV file
  measured: dict[str, float] = {}
  keys = dict.fromkeys(k for task in sweep.tasks.values() for k in task.grid)
  for name, task in sweep.tasks.items():
    final = jobs.finished(graph[name][name], FINAL)
    dev = jobs.finished(graph[name][name], DEV)
    cells = ['', '', 'not finished', '']
    if final:
      chosen, test = final[0].setting, _spread(final)
      if test.percent:  # losses have no mean over tasks
        measured[name] = test.mean
      cells = [_text(chosen), _dev(dev, chosen), str(test), str(len(final))]
    published = [
      f'{column[name]:g}' if name in column else ''
      for column in sweep.published.values()
    ]
    rows.append([name, *cells, *published])
    if dev:
      results = [(_text(each), _dev(dev, each)) for each in task.settings]
      settings = [row for row in results if row[1]]
      details += ['', f'{name}:', '', *_table(['setting', 'dev'], settings)]
    for job in (*dev, *final):
      setting = [job.setting.get(key, '') for key in keys]
      split = jobs.split(job.workdir, job.metric)
      cells = [name, task.group, job.stage, *setting, job.seed, job.metric]
      lines.append([*cells, split, job.value, job.workdir])
  head = ['task', 'chosen', 'dev', 'test', 'runs', *sweep.published]
  legend = 'Mean ± sample standard deviation over seeds; accuracies in %.'
  table = _table(head, rows + _means(sweep, measured))
  text = [f'# {sweep.title}', '', legend, '', *table, *details, '']
  head = ['task', 'group', 'stage', *keys, 'seed', 'metric', 'split', 'value']
  return {
    'results.csv': _csv([*head, 'workdir'], lines),
    'results.md': '\n'.join(text),
  }


def _dev(dev: Sequence[Job], setting: Mapping[str, Any]) -> str:
  """Formats the results of a setting in the dev stage; '' without results."""
  own = [job for job in dev if job.setting == setting]
  return str(_spread(own)) if own else ''


def _means(sweep: Sweep, measured: Mapping[str, float]) -> list[list[str]]:
  """Returns rows with the means over each group of tasks and over all."""
  groups: dict[str, list[str]] = {}
  for name, task in sweep.tasks.items():
    groups.setdefault(task.group, []).append(name)
  if len(groups) < 2:  # its mean would be that over all tasks
    groups = {}
  if len(sweep.tasks) > 1:
    groups['mean'] = [*sweep.tasks]
  published = [
    {name: value / 100 for name, value in column.items()}
    for column in sweep.published.values()
  ]
  rows = []
  for title, names in groups.items():
    mean, *others = (_mean(column, names) for column in (measured, *published))
    if mean or any(others):
      rows.append([f'**{title}** ({len(names)})', '', '', mean, '', *others])
  return rows


def _mean(values: Mapping[str, float], names: Sequence[str]) -> str:
  """Formats the mean over some tasks in percent; '' if a value is missing."""
  if not all(name in values for name in names):
    return ''
  return str(Spread(statistics.fmean(values[name] for name in names)))


def of_study(study: Study, graph: Graph) -> dict[str, str]:
  """Returns the files of results of a study: content by name.

  The table has measured values next to the paper's. The CSV file has one line
  per finished run: fractions, losses, or -inf for a run that diverged. Lines of
  published numbers follow, as fractions and without a workdir.

  Args:
    study: study of a config.
    graph: jobs of the study.
  """
  return {
    'results.csv': _csv_of_study(study, graph),
    'results.md': _markdown_of_study(study, graph),
  }


def _markdown_of_study(study: Study, graph: Graph) -> str:
  """Returns the table of a study, with published numbers in parentheses."""
  columns = list(
    dict.fromkeys(c for row in study.rows.values() for c in row.columns)
  )
  # Without values of pre-trainings, there is no column for them.
  papers = [row.paper for row in study.rows.values()]
  sources = (*graph.values(), *papers, *study.published.values())
  if not any(UPSTREAM in source for source in sources):
    columns = [column for column in columns if column != UPSTREAM]
  rows = []
  for name, row in study.rows.items():
    cells = [name]
    for column in columns:
      measured = spread(graph[name], column)
      number = row.paper.get(column)
      cell = '–' if measured is None else str(measured)
      cell += '' if number is None else f' ({number})'
      cells.append(cell if column in row.columns else '')
    rows.append(cells)
  for name, model in study.published.items():
    numbers = [model.get(column) for column in columns]
    rows.append([name, *(f'({n})' if n is not None else '' for n in numbers)])
  legend = '%; mean ± sample standard deviation over runs.'
  if study.published or any(row.paper for row in study.rows.values()):
    legend += ' Published numbers are in parentheses.'
  lines = [f'# {study.title}', '', *([study.note, ''] if study.note else [])]
  lines += [legend, '', *_table(['row', *columns], rows)]
  all_columns = [each for row in graph.values() for each in row.values()]
  if not all(map(jobs.complete, all_columns)):
    ready = {job.name for each in all_columns for job in each if job.is_ready}
    lines += ['', f'Not finished: {len(ready)} runs can be started now.']
  return '\n'.join([*lines, ''])


def spread(columns: Columns, column: str) -> Spread | None:
  """Returns the value of a column; None if one of its runs is not finished.

  A column with several transfers has the mean over the transfers, without a
  standard deviation.

  Args:
    columns: jobs of a row.
    column: column of the table.
  """
  keys = [key for key in columns if key.partition('/')[0] == column]
  if not keys or not all(jobs.complete(columns[key]) for key in keys):
    return None
  runs = [jobs.finished(columns[key], FINAL) for key in keys]
  if not all(runs):  # all pre-trainings have diverged
    return None
  first, *others = [_spread(each) for each in runs]
  if not others:
    return first
  mean = statistics.fmean(each.mean for each in (first, *others))
  return Spread(mean, percent=first.percent)


def _csv_of_study(study: Study, graph: Graph) -> str:
  """Returns the finished runs and the published numbers of a study as CSV."""
  head = ['row', 'column', 'transfer', 'stage', 'setting', 'seed', 'metric']
  rows: list[list[Any]] = []
  for name in study.rows:
    for key, column in graph[name].items():
      for job in jobs.finished(column):
        setting = ' '.join(f'{k}={v}' for k, v in job.setting.items())
        cells = [job.stage, setting, job.seed, job.metric]
        cells += [job.value, job.workdir]
        rows.append([name, key.partition('/')[0], key, *cells])
  papers = {name: row.paper for name, row in study.rows.items()}
  for name, paper in {**papers, **study.published}.items():
    for column, number in paper.items():
      value = round(number.mean / 100, 7)
      rows.append([name, column, '', 'paper', '', '', '', value, ''])
  return _csv([*head, 'value', 'workdir'], rows)


def _spread(finished: Sequence[Job]) -> Spread:
  """Returns the spread of some runs with the same metric."""
  percent = finished[0].sign >= 0  # losses are not fractions
  return Spread.of([job.value for job in finished], percent)


def _text(setting: Mapping[str, Any]) -> str:
  """Formats a setting: 'schedule.base_lr 0.1, model.depth 2'."""
  return ', '.join(f'{k} {v}' for k, v in setting.items()) or 'as it is'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
  """Returns the lines of a Markdown table."""
  first, *others = (f'| {" | ".join(cells)} |' for cells in (head, *rows))
  return [first, '|---' * len(head) + '|', *others]


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """Returns the content of a CSV file."""
  out = io.StringIO()
  csv.writer(out, lineterminator='\n').writerows([head, *rows])
  return out.getvalue()
