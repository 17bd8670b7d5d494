"""Charts of an HTML report as inline SVG of a few kilobytes each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.analysis.report import html
from vit_jax.analysis.report.html import Html, tag
from vit_jax.analysis.style import COLOURS

Points = tuple[Sequence[float], Sequence[float]]
_SIZE = (440, 250)  # SVG user units; the font size is 11
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 26, 36
_BUCKETS = 200  # buckets per line; each keeps its lowest and highest point
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
_DASHES = (None, '6 3', '2 3')


def lines(
  title: str,
  series: Mapping[str, Points],
  x_label: str = 'step',
  marks: Sequence[float] = (),
) -> Html:
  """Draws one line for each series, without points that are not finite.

  Args:
    title: title of the chart.
    series: (x, y) by name; x ascends.
    x_label: label of the x axis.
    marks: x values that are marked by a vertical line.
  """
  kept = {name: _finite(*points) for name, points in series.items()}
  kept = {name: points for name, points in kept.items() if points}
  if not kept:
    return Html('')
  xs = [x for points in kept.values() for x, _ in points]
  ys = [y for points in kept.values() for _, y in points]
  x_of = _scale(*_limits(xs), _LEFT, _SIZE[0] - _RIGHT)
  y_of = _scale(*_limits(ys), _SIZE[1] - _BOTTOM, _TOP)
  parts = [_axes(title, x_label, xs, ys, x_of, y_of)]
  for position in marks:
    if min(xs) <= position <= max(xs):
      x = f'{x_of(position):.1f}'
      mark = dict(x1=x, x2=x, y1=_TOP, y2=_SIZE[1] - _BOTTOM)
      parts.append(tag('line', **mark, stroke='#D55E00', stroke_dasharray='3'))
  for number, points in enumerate(kept.values()):
    parts.append(_line([(x_of(x), y_of(y)) for x, y in _thin(points)], number))
  drawing = tag(
    'svg',
    *parts,
    viewBox=f'0 0 {_SIZE[0]} {_SIZE[1]}',
    role='img',
    aria_label=title,
  )
  return tag('figure', drawing, _legend(list(kept)))


def _line(points: list[tuple[float, float]], number: int) -> Html:
  colour = COLOURS[number % len(COLOURS)]
  if len(points) == 1:
    (x, y) = points[0]
    return tag('circle', cx=f'{x:.1f}', cy=f'{y:.1f}', r=3, fill=colour)
  return tag(
    'polyline',
    points=' '.join(f'{x:.1f},{y:.1f}' for x, y in points),
    fill='none',
    stroke=colour,
    stroke_width=1.6,
    stroke_dasharray=_DASHES[number // len(COLOURS) % len(_DASHES)],
  )


def _legend(names: list[str]) -> Html:
  """Creates the legend, which lists the names and colours of the lines."""
  if len(names) < 2:
    return tag('figcaption', *names)
  keys = []
  for number, name in enumerate(names):
    colour = COLOURS[number % len(COLOURS)]
    key = tag('span', class_='key', style=f'background:{colour}')
    keys += [tag('span', key, name, class_='named'), ' \u2003']
  return tag('figcaption', *keys)


def _axes(
  title: str, x_label: str, xs: Any, ys: Any, x_of: Any, y_of: Any
) -> Html:
  width, height = _SIZE
  text = dict(font_size=11, fill='#5b6470', font_family='sans-serif')
  parts = []
  for value in ticks(*_limits(ys)):
    y = f'{y_of(value):.1f}'
    parts += [
      tag('line', x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y, stroke='#e6e9ec'),
      tag(
        'text', tick(value), x=_LEFT - 6, y=y, dy=4, text_anchor='end', **text
      ),
    ]
  bottom = height - _BOTTOM
  for value in ticks(*_limits(xs)):
    x = f'{x_of(value):.1f}'
    parts += [
      tag('line', x1=x, x2=x, y1=bottom, y2=bottom + 4, stroke='#5b6470'),
      tag(
        'text', tick(value), x=x, y=bottom + 16, text_anchor='middle', **text
      ),
    ]
  end = dict(x1=_LEFT, x2=width - _RIGHT, y1=bottom, y2=bottom)
  centre = (_LEFT + width - _RIGHT) / 2
  parts += [
    tag('line', **end, stroke='#5b6470'),
    tag('text', x_label, x=centre, y=height - 4, text_anchor='middle', **text),
    tag(
      'text',
      title,
      x=_LEFT,
      y=15,
      **(text | dict(fill='#16191d')),
      font_weight='bold',
    ),
  ]
  return html.join(parts)


def _finite(xs: Sequence[float], ys: Sequence[float]) -> list[Any]:
  pairs = zip(xs, ys, strict=True)
  return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def _thin(points: list[Any]) -> list[Any]:
  """Keeps at most two points per bucket: the lowest and the highest."""
  if len(points) <= 2 * _BUCKETS:
    return points
  kept = []
  for bucket in range(_BUCKETS):
    start = bucket * len(points) // _BUCKETS
    part = points[start : (bucket + 1) * len(points) // _BUCKETS]
    low, high = (f(part, key=lambda point: point[1]) for f in (min, max))
    kept += sorted({low, high})
  return kept


def _limits(values: Sequence[float]) -> tuple[float, float]:
  low, high = min(values), max(values)
  if high > low:
    return low, high
  margin = abs(low) / 10 or 1.0
  return low - margin, high + margin


def _scale(low: float, high: float, start: float, stop: float) -> Any:
  return lambda value: start + (value - low) / (high - low) * (stop - start)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
  """Returns multiples of 1, 2 or 5 times 10^n between two limits."""
  rough = (high - low) / most
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
  first = math.ceil(low / step - 1e-9)
  last = math.floor(high / step + 1e-9)
  return [index * step for index in range(first, last + 1)]


def tick(value: float) -> str:
  """Formats the label of a tick: '20k', '1.5M', '0.001', '1e-05'."""
  for size, letter in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if abs(value) >= size:
      return f'{value / min(size, 1e3 if letter == "k" else size):.4g}{letter}'
  return f'{value:.4g}'


def fractions(parts: Mapping[str, float]) -> Html:
  """Draws a bar of the parts of a total, and a table of their values.

  Args:
    parts: seconds by kind, at least 0.
  """
  parts = {name: value for name, value in parts.items() if value > 0}
  total = sum(parts.values())
  if not parts:
    return Html('')
  ordered = sorted(
    parts.items(), key=lambda item: (item[0] != 'step', -item[1])
  )
  pieces, rows = [], []
  for number, (name, value) in enumerate(ordered):
    colour = COLOURS[(2, 0, 1, 3, 4, 5, 6, 7)[number % 8]]
    percent = 100 * value / total
    style = f'width:{percent:.3f}%;background:{colour}'
    pieces.append(
      tag(
        'div',
        style=style,
        title=f'{_SPAN_LABELS.get(name, name)} {percent:.1f} %',
      )
    )
    key = tag('span', class_='key', style=f'background:{colour}')
    label = tag('span', key, _SPAN_LABELS.get(name, name))
    rows.append((label, f'{percent:.1f} %', f'{value:,.1f} s'))
  table = html.table(('', 'fraction', 'time'), rows, numbers=2)
  return html.join([tag('div', *pieces, class_='bar'), table])


def matrix(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Html:
  """Draws a confusion matrix, with one row per true class.

  Cells are coloured by the fraction of their row.
  """
  head = [tag('th', 'true \\ predicted'), *(tag('th', n[:12]) for n in names)]
  rows = []
  for name, row in zip(names, counts, strict=True):
    total, cells = max(sum(row), 1), []
    for column, count in enumerate(row):
      fraction = count / total
      dark = 'color:#fff;' if fraction > 0.6 else ''
      style = f'{dark}background:rgba(0,80,140,{fraction:.3f})'
      title = f'{name} predicted as {names[column]}: {count} of {sum(row)}'
      cells.append(tag('td', count or '·', style=style, title=title))
    rows.append(tag('tr', tag('th', name), *cells))
  table = tag('table', tag('thead', tag('tr', *head)), tag('tbody', *rows))
  return tag('div', table, class_='scroll matrix')
