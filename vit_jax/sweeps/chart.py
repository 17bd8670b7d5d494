"""The figure of a study, with measured and published points."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
from etils import epath

from vit_jax.analysis import curves, plotting
from vit_jax.sweeps import jobs, tables
from vit_jax.sweeps.grid import AXES, UPSTREAM, Row, Study
from vit_jax.sweeps.jobs import Columns, Graph

Arrays = dict[str, np.ndarray]


def arrays(study: Study, graph: Graph) -> Arrays:
  """Returns the data of the figure.

  Returns:
    Arrays `[3, n]` by 'column/line', ordered by x: positions on the x axis,
    values in %, and sample standard deviations (0 for a single run). Published
    values have the key 'column/line/paper' and standard deviations of 0.
  """
  assert study.figure is not None
  if study.figure.x == 'epochs':
    return _over_epochs(study, graph)
  found = defaultdict(list)
  for column in study.figure.columns:
    for name, row in study.rows.items():
      x = x_position(study.figure.x, row, graph[name])
      value = tables.spread(row, graph[name], column)
      if x is None or value is None or not math.isfinite(value.mean):
        continue
      std = 0.0 if math.isnan(value.std) else value.std
      for line in row.lines or (name,):
        found[f'{column}/{line}'].append((x, 100 * value.mean, 100 * std))
    for name, model in {**study.rows, **study.published}.items():
      if model.place is not None and column in model.paper:
        for line in model.lines or (name,):
          point = (model.place, model.paper[column].mean, 0.0)
          found[f'{column}/{line}/paper'].append(point)
  return {key: np.array(sorted(points)).T for key, points in found.items()}


def x_position(x: str, row: Row, columns: Columns) -> float | None:
  """Returns a row's position on the x axis, such as its pre-training cost.

  Args:
    x: key of `AXES`.
    row: row of a study.
    columns: jobs of the row.

  Returns:
    The position; None if the pre-trainings are not finished, or if it is not
    defined.
  """
  pretrain = columns.get(UPSTREAM, ())
  if x in ('images', 'images_per_second') or not pretrain:
    return row.place
  costs = [
    scale[1][-1]
    for job in jobs.finished(pretrain)
    if (scale := curves.read_run(epath.Path(job.workdir)).scales.get(x))
  ]
  if not costs or not jobs.complete(pretrain):
    return None
  return float(np.mean(costs))


def _over_epochs(study: Study, graph: Graph) -> Arrays:
  """Returns pre-training metrics by epoch, as mean and std over seeds."""
  assert study.figure is not None
  found = {}
  for name in study.rows:
    runs = [
      curves.read_run(epath.Path(job.workdir))
      for job in jobs.finished(graph[name].get(UPSTREAM, ()))
    ]
    for metric in study.figure.columns:
      series = [
        run.over('epochs', metric)
        for run in runs
        if metric in run.series and 'epochs' in run.scales
      ]
      if series and all(one.shape == series[0].shape for one in series):
        values = 100 * np.stack([one[1] for one in series])
        std = values.std(0, ddof=1) if len(series) > 1 else 0 * values[0]
        stacked = np.stack([series[0][0], values.mean(0), std])
        found[f'{metric}/{name}'] = stacked
  return found


def figure(study: Study, found: Arrays) -> Any:
  """Draws the figure: one panel for each column, one colour for each line.

  Args:
    study: study with a figure.
    found: result of `arrays`.
  """
  assert study.figure is not None
  ticks = None if study.figure.x == 'epochs' else []
  if study.figure.x == 'images':
    ticks = sorted({row.place for row in study.rows.values() if row.place})
  lines = dict.fromkeys(
    line
    for name, model in {**study.rows, **study.published}.items()
    for line in model.lines or (name,)
  )
  panels = []
  for column in study.figure.columns:
    measured, published = (
      {
        line: found[key]
        for line in lines
        if (key := f'{column}/{line}{end}') in found
      }
      for end in ('', '/paper')
    )
    x, y = AXES[study.figure.x], f'{column} (%)'
    panels.append(plotting.Panel(x, y, measured, published, ticks))
  return plotting.draw(panels, len(panels), study.title)
