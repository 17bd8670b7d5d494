"""Charts of an HTML report."""

import base64
import io
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

import numpy as np

from vit_jax.analysis import plotting
from vit_jax.analysis.report import html
from vit_jax.analysis.report.html import tag
from vit_jax.analysis.style import COLOURS

Points = tuple[Sequence[float], Sequence[float]]
_SPAN_LABELS = {  # descriptions of the spans of the ledger
  'step': 'training steps that were kept',
  'lost': 'training steps repeated after a restart',
  'down': 'time between two starts',
  'data_wait': 'waiting for data',
  'eval': 'evaluation',
  'save': 'saving checkpoints',
  'restore': 'restoring or initializing weights',
  'compile': 'compilation',
  'init': 'opening data and weights',
  'report': 'writing this report',
}


def lines(
  title: str,
  series: Mapping[str, Points],
  x_label: str = 'step',
  marks: Sequence[float] = (),
) -> Element | None:
  """Draws one line for each series as an SVG image of at most 50 kB.

  Args:
    title: title of the chart.
    series: (x, y) by name; x ascends.
    x_label: label of the x axis.
    marks: x values that are marked by a vertical line.

  Returns:
    The figure with its title and legend; None if no value is finite.
  """
  if not any(np.isfinite(values).any() for _, values in series.values()):
    return None
  from matplotlib import rc_context, ticker

  # Text stays text. Points of a line that are less than a pixel apart are
  # merged, so the size does not grow with the length of the training.
  with rc_context({'svg.fonttype': 'none', 'path.simplify_threshold': 1.0}):
    figure = plotting.new_figure(4.4, 2.5)
    axes = figure.add_subplot()
    for number, points in enumerate(series.values()):
      plotting.line(axes, points, number)
    for x in marks:
      axes.axvline(x, color='#D55E00', linestyle='--', linewidth=1)
    plotting.describe(axes, x_label)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
    file = io.BytesIO()
    figure.savefig(file, format='svg')
  data = base64.b64encode(file.getvalue()).decode()
  image = tag('img', src=f'data:image/svg+xml;base64,{data}', alt=title)
  names = [
    tag('span', _key(number), name, class_='named')
    for number, name in enumerate(series)
  ]
  return tag('figure', tag('b', title), image, tag('figcaption', *names))


def _colour(number: int) -> str:
  return COLOURS[number % len(COLOURS)]


def _key(number: int) -> Element:
  """Returns a small square with the colour of a line."""
  return tag('span', class_='key', style=f'background:{_colour(number)}')


def fractions(parts: Mapping[str, float]) -> Element | None:
  """Draws a bar of the parts of a total, and a table of their values.

  Args:
    parts: seconds by kind, at least 0.

  Returns:
    Bar and table; None if the total is 0.
  """
  total = sum(parts.values())
  if not total:
    return None
  positive = ((name, value) for name, value in parts.items() if value > 0)
  ordered = sorted(positive, key=lambda item: (item[0] != 'step', -item[1]))
  pieces, rows = [], []
  for number, (name, value) in enumerate(ordered):
    label = _SPAN_LABELS.get(name, name)
    percentage = f'{100 * value / total:.1f} %'
    style = f'width:{100 * value / total}%;background:{_colour(number)}'
    pieces.append(tag('div', style=style, title=f'{label} {percentage}'))
    label = tag('span', _key(number), label)
    rows.append((label, percentage, f'{value:,.1f} s'))
  table = html.table(('', 'fraction', 'time'), rows, numbers=2)
  return tag('div', tag('div', *pieces, class_='bar'), table)


def matrix(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Element:
  """Draws a confusion matrix, with one row per true class.

  Cells are coloured by the fraction of their row.
  """
  rows = []
  for name, row in zip(names, counts, strict=True):
    total, cells = max(sum(row), 1), []
    for predicted, count in zip(names, row, strict=True):
      fraction = count / total
      dark = 'color:#fff;' if fraction > 0.6 else ''
      style = f'{dark}background:rgba(0,80,140,{fraction:.3f})'
      title = f'{name} predicted as {predicted}: {count} of {sum(row)}'
      cells.append(tag('td', count or '·', style=style, title=title))
    rows.append(tag('tr', tag('th', name), *cells))
  columns = ('true \\ predicted', *(name[:12] for name in names))
  head = tag('tr', *(tag('th', column) for column in columns))
  table = tag('table', tag('thead', head), tag('tbody', *rows))
  return tag('div', table, class_='scroll matrix')
