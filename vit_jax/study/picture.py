"""Draws the figure of a study, with measured and published points."""

from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float

from vit_jax.analysis import plotting
from vit_jax.analysis import runs as curves
from vit_jax.analysis.style import COLOURS
from vit_jax.study import tables
from vit_jax.study.chains import Chain
from vit_jax.study.contents import AXES, GIVEN_AXES, Row, Study
from vit_jax.study.tables import Chains

Arrays = dict[str, np.ndarray]
_MARKERS = 'osD^vP'


def arrays(study: Study, chains: Chains) -> Arrays:
  """Returns the data of the figure.

  Returns:
    Arrays `[3, n]` by 'column/line', ordered by x: positions on the x axis,
    values in %, and sample standard deviations (0 for a single run). Published
    values have the key 'column/line/paper' and standard deviations of 0.
  """
  assert study.figure is not None
  if study.figure.x == 'epochs':
    return _curves(study, chains)
  found: dict[str, list[tuple[float, float, float]]] = {}
  for name, row in study.rows.items():
    x = x_position(study.figure.x, row, chains[name])
    for column in study.figure.columns:
      value = tables.points(column, chains[name])
      for line in row.lines or (name,):
        key = f'{column}/{line}'
        if x is not None and value is not None:
          found.setdefault(key, []).append((x, *value))
  for name, model in {**study.rows, **study.published}.items():
    for column in study.figure.columns:
      if model.place is not None and column in model.paper:
        point = (model.place, model.paper[column].mean, 0.0)
        for line in model.lines or (name,):
          found.setdefault(f'{column}/{line}/paper', []).append(point)
  return {key: np.array(sorted(points)).T for key, points in found.items()}


def x_position(x: str, row: Row, chain: Chain) -> float | None:
  """Returns a row's position on the x axis, such as its pre-training cost.

  Args:
    x: key of `AXES`.
    row: row of a study.
    chain: progress of the row.

  Returns:
    The position; None if the pre-trainings are not finished, or if it is not
    defined.
  """
  if x in GIVEN_AXES or not chain.pretrain.runs:
    return row.place
  if not chain.pretrain.complete:
    return None
  costs = [
    scale[1][-1]
    for run, _ in chain.pretrain.scores
    if (scale := curves.read(epath.Path(run.workdir)).scales.get(x))
  ]
  return float(np.mean(costs)) if costs else None


def _curves(study: Study, chains: Chains) -> Arrays:
  """Returns pre-training metrics by epoch, as mean and std over seeds."""
  assert study.figure is not None
  found = {}
  for name in study.rows:
    runs = [
      curves.read(epath.Path(run.workdir))
      for run, _ in chains[name].pretrain.scores
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


def figure(study: Study, found: Arrays) -> bytes:
  """Draws the figure: one panel for each column, one colour for each line."""
  assert study.figure is not None
  columns = study.figure.columns
  lines = list(
    dict.fromkeys(
      line
      for name, model in {**study.rows, **study.published}.items()
      for line in model.lines or (name,)
    )
  )
  picture = plotting.new_figure(max(6, 4.2 * len(columns)), 4.4)
  picture.suptitle(study.title, fontsize=10, wrap=True)
  panels = picture.subplots(1, len(columns), squeeze=False)[0]
  for axes, column in zip(panels, columns, strict=True):
    for number, line in enumerate(lines):
      key = f'{column}/{line}'
      if key in found:
        _line(axes, found[key], number, line)
      if f'{key}/paper' in found:
        _line(axes, found[f'{key}/paper'], number, f'{line} (paper)', True)
    if study.figure.x != 'epochs':
      _logarithmic(axes, study)
    plotting.describe(axes, AXES[study.figure.x], f'{column} (%)')
  plotting.legend(picture, 'outside lower center', max(3, 2 * len(columns)))
  return plotting.png(picture)


def _logarithmic(axes: Any, study: Study) -> None:
  """Makes the x axis logarithmic and sets its ticks."""
  from matplotlib import ticker

  axes.set_xscale('log')
  if study.figure is not None and study.figure.x == 'images':
    counts = sorted({row.place for row in study.rows.values() if row.place})
    axes.set_xticks(counts, [_count(count) for count in counts])
  else:
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter('{x:,g}')
  axes.minorticks_off()


def _count(images: float) -> str:
  """Formats a number of images: '2,500' or '14.1 M'."""
  return f'{images / 1e6:.3g} M' if images >= 1e6 else f'{images:,.0f}'


def _line(
  axes: Any,
  points: Float[np.ndarray, '3 n'],
  number: int,
  label: str,
  published: bool = False,
) -> None:
  """Draws the points of one model.

  Published points are hollow and their line is dotted.
  """
  colour = COLOURS[number % len(COLOURS)]
  axes.errorbar(
    *points[:2],
    yerr=None if published else points[2],
    color=colour,
    marker=_MARKERS[number // len(COLOURS) % len(_MARKERS)],
    markerfacecolor='none' if published else colour,
    markersize=6 if published else 4,
    linestyle=':' if published else '-',
    linewidth=1,
    capsize=2,
    label=label,
  )
