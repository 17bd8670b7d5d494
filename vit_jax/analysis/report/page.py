"""HTML report of a run, report.html.

This file computes the contents of the sections; `template.html` contains the
page.
"""

import io
import itertools
import json
import logging
import pathlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from etils import epath

from vit_jax.analysis import plotting
from vit_jax.analysis.gallery import FIGURES
from vit_jax.analysis.plotting import COLOURS
from vit_jax.analysis.report import record
from vit_jax.analysis.report.record import Record
from vit_jax.config import direction
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.run import ledger

log = logging.getLogger('vit_jax')
NAME = 'report.html'
MAX_BYTES = 3_000_000
_TEMPLATE = pathlib.Path(__file__).with_name('template.html')
_EVENTS = 40  # maximum number of events shown
# Results that are shown in percent everywhere: accuracies and their deviations.
_FRACTION = re.compile(r'.*accuracy|top\d+|\d+(shot|nn)(_std)?')
_FIELD = 300  # maximum number of characters shown of an event or a value
_QUIET = ('spans',)  # events that the bar of times already represents
_TITLES = {  # titles of the charts of training metrics
  'lr': 'learning rate',
  'img_per_sec': 'images per second',
  'data_wait': 'fraction of time waiting for data',
  'grad_norm': 'gradient norm',
  'mfu': 'model FLOPs utilisation',
}
_SPAN_LABELS = {  # descriptions of the spans of the event log
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


class Chart(NamedTuple):
  """A chart of one or more lines.

  Attributes:
    title: title of the chart.
    src: data URI of its image.
    lines: name and colour of each line.
  """

  title: str
  src: str
  lines: list[tuple[str, str]]


def render(run: Record) -> str:
  """Renders the HTML report of a run, without pictures if it is too large."""
  text = _render_run(run)
  if len(text.encode()) > MAX_BYTES:
    text = _render_run(run._replace(figures={}))
  if len(text.encode()) > MAX_BYTES:
    text = _render_run(run._replace(figures={}, pictures={}))
  return text


def _render_run(run: Record) -> str:
  listed = [e for e in run.events if e['event'] not in _QUIET]
  counts = Counter(event['event'] for event in listed).most_common()
  return _page(
    run=run,
    heading=run.name,
    tiles=_tiles(run),
    charts=_curves(run),
    results=_results(run),
    config=json.dumps(run.config, indent=1, ensure_ascii=False),
    times=_times(run),
    event_counts=', '.join(f'{kind} {count:,}' for kind, count in counts),
    num_events=len(listed),
    events=[_event(event) for event in listed[-_EVENTS:]],
    figures=[
      (record.data_uri('png', content), FIGURES[name])
      for name, content in run.figures.items()
    ],
  )


def write(workdir: epath.Path) -> None:
  """Writes WORKDIR/report.html.

  Errors are logged and never end the run.
  """
  try:
    paths.write(workdir / NAME, render(record.read(workdir)))
  except Exception as error:  # noqa: BLE001 (a report must not end the run)
    log.warning(
      '%s could not be written: %s: %s', NAME, type(error).__name__, error
    )


def _page(**content: Any) -> str:
  """Returns a complete page that does not depend on other files."""
  environment = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  template = environment.from_string(_TEMPLATE.read_text('utf-8'))
  text = template.render(content, colours=COLOURS, max_field=_FIELD)
  # Names of files may have bytes that are not UTF-8.
  return text.encode(errors='backslashreplace').decode()


def draw_chart(
  title: str,
  series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
  marks: Sequence[float] = (),
) -> Chart | None:
  """Draws one line for each series as an SVG image of at most 50 kB.

  Args:
    title: title of the chart.
    series: steps, ascending, and values, by name.
    marks: steps that are marked by a vertical line.

  Returns:
    The chart; None if no value is finite.
  """
  if not any(np.isfinite(values).any() for _, values in series.values()):
    return None
  from matplotlib import rc_context, ticker

  # Text stays text. Points of a line that are less than a pixel apart are
  # merged, so the size does not grow with the length of the training.
  with rc_context({'svg.fonttype': 'none', 'path.simplify_threshold': 1.0}):
    figure = plotting.new_figure(4.4, 2.5)
    axes = figure.add_subplot()
    for index, points in enumerate(series.values()):
      plotting.line(axes, points, index)
    for x in marks:
      axes.axvline(x, color='#D55E00', linestyle='--', linewidth=1)
    plotting.describe(axes, 'step')
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
    if _FRACTION.fullmatch(title.rpartition('/')[2]):
      axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, symbol=' %'))
    file = io.BytesIO()
    figure.savefig(file, format='svg')
  lines = list(zip(series, itertools.cycle(COLOURS), strict=False))
  return Chart(title, record.data_uri('svg+xml', file.getvalue()), lines)


def _result(name: str, value: float) -> str:
  """Formats a value of a metric: '57.13 %' for accuracies, or a number."""
  if _FRACTION.fullmatch(name.rpartition('/')[2]):
    return f'{100 * value:.2f} %'
  return _number(value)


def _number(value: float, digits: int = 5) -> str:
  """Formats a number for reading: '0.5713', '1.2e-05', '12,345'."""
  if float(value).is_integer() and abs(value) < 1e15:
    return f'{int(value):,}'
  return f'{value:.{digits}g}'


def _tiles(run: Record) -> list[tuple[str, str]]:
  """Returns names and values of the progress and the latest results."""
  total = run.total_steps
  progress = f'{run.step:,}' + (f' of {total:,}' if total else '')
  tiles = [('step', progress)]
  for name in run.evaluations:
    if name.endswith('/accuracy'):
      tiles.append((name, _result(name, run.series[name][1][-1])))
  best = run.config.get('checkpoint', {}).get('best')
  if best in run.evaluations:
    # The later of two equal values, as `checkpoint.best` chooses.
    steps, values = run.series[best]
    sign = _sign(run, best) or 1
    pairs = zip(values, steps, strict=True)
    value, step = max(pairs, key=lambda pair: (sign * pair[0], pair[1]))
    text = f'best {best}, at step {step:,} (--step=best)'
    tiles.append((text, _result(best, value)))
  for name, label in (
    ('loss', 'training loss, last logged batch'),
    ('img_per_sec', 'images/s, last logged interval'),
  ):
    if name in run.series:
      tiles.append((label, _number(run.series[name][1][-1], 4)))
  summary = ledger.summarise(run.events)
  if summary.seconds:
    tiles.append(('goodput', f'{100 * summary.goodput:.1f} %'))
  paper = run.config.get('paper_core_days')
  devices = run.run.get('num_devices')
  if isinstance(devices, int) and summary.seconds:
    days = summary.seconds.get(ledger.PRODUCTIVE, 0.0) * devices / 86400
    label = 'device-days of training'
    label += f' (paper: {_number(paper)} TPUv3 core-days)' if paper else ''
    tiles.append((label, _number(days, 3)))
  return tiles


def _curves(run: Record) -> list[Chart]:
  """Draws losses, other results, learning rate, speed and gradient norm."""
  groups: dict[str, list[str]] = {'loss': ['loss']}
  for name in run.evaluations:
    kind = name.rpartition('/')[2]
    if kind != 'count':
      groups.setdefault(kind, []).append(name)
  groups |= {title: [name] for name, title in _TITLES.items()}
  marks = [e['from'] for e in run.events if e['event'] == 'rollback']
  charts = []
  for title, names in groups.items():
    series = {name: run.series[name] for name in names if name in run.series}
    charts.append(draw_chart(title, series, marks))
  return [chart for chart in charts if chart is not None]


def _sign(run: Record, metric: str) -> int:
  """Returns whether higher (1), lower (-1) or no values (0) are better."""
  try:
    return direction.sign(run.config.get('evals', {}), metric)
  except UserError:  # a plug-in that this machine lacks
    return 0


def _results(run: Record) -> list[tuple[str, ...]]:
  """Returns the last and the best value of each evaluation."""
  rows = []
  for name in run.evaluations:
    steps, values = run.series[name]
    best_cell = ''
    if sign := _sign(run, name):
      best = max(values, key=lambda value: sign * value)
      best_cell = f'{_result(name, best)} at {steps[values.index(best)]:,}'
    last = _result(name, values[-1])
    rows.append((name, last, f'{steps[-1]:,}', best_cell))
  return rows


def _times(run: Record) -> list[tuple[str, float]]:
  """Returns description and seconds of each use of time, training first."""
  seconds = ledger.summarise(run.events).seconds
  ordered = sorted(seconds, key=lambda name: (name != 'step', -seconds[name]))
  return [
    (_SPAN_LABELS.get(name, name), seconds[name])
    for name in ordered
    if seconds[name] > 0
  ]


def _event(event: dict[str, Any]) -> tuple[str, str, str]:
  hidden = ('time', 'event', 'crc')
  fields = {k: v for k, v in event.items() if k not in hidden}
  text = json.dumps(fields, ensure_ascii=False)[:_FIELD]
  return event['time'], event['event'], text
