"""HTML report of a run, report.html.

This file reads the workdir and computes the contents of the sections;
`report.html` in this directory is the template of the page. Pictures require
images and weights, and are therefore stored in WORKDIR/report.json, so that
reports that are written later contain them too.
"""

import base64
import io
import itertools
import json
import logging
import os
import pathlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cv2
import jinja2
import numpy as np
from etils import epath
from jaxtyping import UInt8

from vit_jax.analysis import curves, gallery, plotting
from vit_jax.analysis.gallery import FIGURES
from vit_jax.analysis.plotting import COLOURS
from vit_jax.config import direction, durations
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger

log = logging.getLogger('vit_jax')
NAME = 'report.html'
MAX_BYTES = 3_000_000
_TEMPLATE = pathlib.Path(__file__).with_name('report.html')
_EVENTS = 40  # maximum number of events shown
# Metrics that are shown in percent: accuracies and their standard deviations.
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
PICTURES = 'report.json'  # written when a run ends and by the command `report`
_MAX_FIGURE_BYTES = 2**20  # larger figures are left out
_MAX_SIDE = 160  # larger images are shrunk to this side length, pixels
_MAX_PNG_SIDE = 64  # JPEG blocks would be visible in such small images, pixels


class Record(NamedTuple):
  """Content of the workdir of a run.

  Attributes:
    name: name of the workdir.
    config: content of config.json; {} if the file is missing or damaged.
    run: content of run.json; {} if the file is missing or damaged.
    series: (steps, values) of each metric.
    nulls: (step, metric) of each value that was not finite.
    events: lines of events.jsonl.
    pictures: pictures and predictions, see `write_pictures`.
    figures: PNG files of the folder of figures, by name.
    figures_of: `weights` and `images` from which the figures were drawn.
    total_steps: length of the whole training; None if the config does not
      contain it.
  """

  name: str
  config: dict[str, Any]
  run: dict[str, Any]
  series: curves.Series
  nulls: list[tuple[int, str]]
  events: list[dict[str, Any]]
  pictures: dict[str, Any]
  figures: dict[str, bytes]
  figures_of: dict[str, Any]
  total_steps: int | None

  @property
  def step(self) -> int:
    """Last step at which a metric was logged."""
    return max((steps[-1] for steps, _ in self.series.values()), default=0)

  @property
  def command(self) -> list[str]:
    """Command line of the last start; [] without one."""
    command = self.run.get('command', [])
    return [str(word) for word in command] if isinstance(command, list) else []

  @property
  def config_path(self) -> str:
    """Value of --config in the command line; '' without one."""
    for word, value in itertools.pairwise([*self.command, '']):
      if word.startswith('--config='):
        return word.partition('=')[2]
      if word == '--config':
        return value
    return ''

  @property
  def changes(self) -> dict[str, str]:
    """Config keys that flags changed, such as {'seed': '1'}."""
    pattern = re.compile(r'--config\.([\w.]+)=(.*)', re.DOTALL)
    matches = (pattern.match(word) for word in self.command)
    return {match[1]: match[2] for match in matches if match}

  @property
  def evaluations(self) -> list[str]:
    """Names of evaluators' metrics, for example 'test/accuracy'."""
    return sorted(name for name in self.series if '/' in name)


def read(workdir: epath.Path) -> Record:
  """Reads a workdir; missing or damaged parts are omitted.

  Raises:
    UserError: the directory is not a workdir, or a file cannot be read.
  """
  config = jsonl.read_object(workdir / 'config.json')
  run = jsonl.read_object(workdir / 'run.json')
  if not config and not (workdir / 'metrics.jsonl').exists():
    raise UserError(
      f'{workdir} contains neither config.json nor metrics.jsonl: give the '
      'workdir of a run.'
    )
  series, nulls = curves.read_all(workdir)
  return Record(
    name=os.path.basename(os.fspath(workdir).rstrip('/')),
    config=config,
    run=run,
    series=series,
    nulls=nulls,
    events=ledger.read(workdir / 'events.jsonl'),
    pictures=jsonl.read_object(workdir / PICTURES),
    figures=_figures(workdir / gallery.FOLDER),
    figures_of=gallery.about(workdir / gallery.FOLDER),
    total_steps=_total_steps(config),
  )


def _figures(folder: epath.Path) -> dict[str, bytes]:
  """Reads the figures that were drawn last, all from the same weights."""
  drawn = gallery.about(folder).get('figures', FIGURES)
  contents = {}
  for name in FIGURES:
    file = folder / f'{name}.png'
    if name in drawn and file.exists():
      content = file.read_bytes()
      if 0 < len(content) <= _MAX_FIGURE_BYTES:
        contents[name] = content
  return contents


def _total_steps(config: dict[str, Any]) -> int | None:
  """Returns the length of the training; None if the config is incomplete."""
  try:
    return durations.Length.of(config).total_steps
  except (KeyError, TypeError, UserError):
    return None


def picture(
  pixels: UInt8[np.ndarray, 'y x 3'], caption: list[str]
) -> dict[str, Any]:
  """Encodes an image for the page: `src` (a data URI) and `caption` (lines)."""
  scale = _MAX_SIDE / max(pixels.shape[:2])
  if scale < 1:
    size = [max(1, round(side * scale)) for side in pixels.shape[1::-1]]
    pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  kind = 'png' if max(pixels.shape) <= _MAX_PNG_SIDE else 'jpeg'
  done, data = cv2.imencode(f'.{kind}', pixels[..., ::-1])
  assert done
  return {'src': data_uri(kind, data.tobytes()), 'caption': caption}


def data_uri(kind: str, content: bytes) -> str:
  """Returns an image as a data URI; `kind` is 'png', 'jpeg' or 'svg+xml'."""
  return f'data:image/{kind};base64,{base64.b64encode(content).decode()}'


def write_pictures(workdir: epath.Path, values: dict[str, Any]) -> None:
  """Writes pictures and predictions to WORKDIR/report.json.

  Args:
    workdir: directory of the run.
    values: `step`, `training` (pictures) and `judged`, from
      `training.reporting.predict_examples`.

  Raises:
    OSError: the file cannot be written.
  """
  paths.write(workdir / PICTURES, json.dumps(values))


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
  text = _page(run)
  for name in ('figures', 'pictures'):
    if len(text.encode()) > MAX_BYTES:
      run = run._replace(**{name: {}})
      text = _page(run)
  return text


def _page(run: Record) -> str:
  """Returns a complete page that does not depend on other files."""
  listed = [e for e in run.events if e['event'] not in _QUIET]
  counts = Counter(event['event'] for event in listed).most_common()
  environment = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  template = environment.from_string(_TEMPLATE.read_text('utf-8'))
  text = template.render(
    run=run,
    tiles=_tiles(run),
    charts=_curves(run),
    results=_results(run),
    config=json.dumps(run.config, indent=1, ensure_ascii=False),
    times=_times(run),
    event_counts=', '.join(f'{kind} {count:,}' for kind, count in counts),
    num_events=len(listed),
    events=[_event(event) for event in listed[-_EVENTS:]],
    figures=[
      (data_uri('png', content), FIGURES[name])
      for name, content in run.figures.items()
    ],
    colours=COLOURS,
    max_field=_FIELD,
  )
  # Names of files may have bytes that are not UTF-8.
  return text.encode(errors='backslashreplace').decode()


def write(workdir: epath.Path) -> None:
  """Writes WORKDIR/report.html.

  Errors are logged and never end the run.
  """
  try:
    paths.write(workdir / NAME, render(read(workdir)))
  except Exception as error:  # noqa: BLE001 (a report must not end the run)
    log.warning(
      '%s could not be written: %s: %s', NAME, type(error).__name__, error
    )


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
  return Chart(title, data_uri('svg+xml', file.getvalue()), lines)


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
    step, value = _best(run, best, _sign(run, best) or 1)
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


def _best(run: Record, metric: str, sign: int) -> tuple[int, float]:
  """Returns step and value of the best result of a metric.

  Of equal values, it is the last one, as for `checkpoint.best`.
  """
  pairs = zip(*run.series[metric], strict=True)
  return max(pairs, key=lambda pair: (sign * pair[1], pair[0]))


def _results(run: Record) -> list[tuple[str, ...]]:
  """Returns the last and the best value of each evaluation."""
  rows = []
  for name in run.evaluations:
    steps, values = run.series[name]
    best_cell = ''
    if sign := _sign(run, name):
      step, best = _best(run, name, sign)
      best_cell = f'{_result(name, best)} at {step:,}'
    last = _result(name, values[-1])
    rows.append((name, last, f'{steps[-1]:,}', best_cell))
  return rows


def _times(run: Record) -> list[tuple[str, float]]:
  """Returns name and seconds of each use of time, training first."""
  seconds = ledger.summarise(run.events).seconds
  ordered = sorted(seconds, key=lambda name: (name != 'step', -seconds[name]))
  return [(name, seconds[name]) for name in ordered if seconds[name] > 0]


def _event(event: dict[str, Any]) -> tuple[str, str, str]:
  """Returns time, name and, as JSON, the other fields of an event."""
  hidden = ('time', 'event', 'crc')
  fields = {k: v for k, v in event.items() if k not in hidden}
  text = json.dumps(fields, ensure_ascii=False)[:_FIELD]
  return event['time'], event['event'], text
