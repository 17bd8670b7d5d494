"""HTML reports: report.html of one run, and a comparison of several runs."""

import logging
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from etils import epath

from vit_jax.analysis.report import chart, html, record, sections
from vit_jax.analysis.report.html import number, tag
from vit_jax.analysis.report.record import Record
from vit_jax.files import atomic

log = logging.getLogger('vit_jax')
NAME = 'report.html'
MAX_BYTES = 3_000_000
_COMPARED = ('loss', 'lr', 'img_per_sec', 'grad_norm')


def render(run: Record) -> str:
  """Renders the HTML report of a run, without pictures if it is too large."""
  text = _render(run)
  if len(text.encode()) > MAX_BYTES:
    text = _render(run._replace(figures={}))
  if len(text.encode()) > MAX_BYTES:
    text = _render(run._replace(figures={}, parts={}))
  return text


def _render(run: Record) -> str:
  body = [
    tag('h1', run.name),
    sections.overview(run),
    _headed('Curves', sections.curves(run)),
    _headed('Results', sections.results(run)),
    _headed('Configuration', sections.what_ran(run)),
    _headed('Time and events', sections.events(run)),
    _headed('Figures', sections.figures(run)),
  ]
  if run.parts.get('training'):
    note = (
      'The first images of the training, as they are passed to the model: '
      'augmented and, if the config enables it, mixed.'
    )
    shown = sections.pictures(run.parts['training'])
    body += [tag('h2', 'Training images'), tag('p', note, class_='soft'), shown]
  body.append(sections.predictions(run.parts))
  return html.page(f'{run.name}: vit_jax run', *body)


def _headed(title: str, content: Element | None) -> Element | None:
  return None if content is None else tag('div', tag('h2', title), content)


def render_comparison(several: Sequence[Record]) -> str:
  """Renders curves, results and config differences of several runs."""
  runs = [
    run._replace(name=f'{index}: {run.name}')
    for index, run in enumerate(several, 1)
  ]
  metrics = {name for run in runs for name in run.evaluations}
  shown = [n for n in sorted(metrics) if not n.endswith('/count')]
  charts = []
  for name in (*_COMPARED, *shown):
    series = {run.name: run.series[name] for run in runs if name in run.series}
    charts.append(chart.lines(sections.TITLES.get(name, name), series))
  rows = []
  for name in ('loss', *shown):
    values = [
      run.series[name][1][-1:] if name in run.series else [] for run in runs
    ]
    rows.append((name, *(number(v[0]) if v else '–' for v in values)))
  rows.append(('step', *(f'{run.step:,}' for run in runs)))
  head = ('last value', *(run.name for run in runs))
  return html.page(
    f'{len(runs)} runs: vit_jax',
    tag('h1', f'{len(runs)} runs'),
    tag('div', *charts, class_='charts'),
    _headed('Results', html.table(head, rows, numbers=len(runs))),
    _headed('Config differences', sections.config_differences(runs)),
  )


def write(workdir: epath.Path) -> None:
  """Writes WORKDIR/report.html.

  Errors are logged and never end the run.
  """
  try:
    atomic.write(workdir / NAME, render(record.read(workdir)))
  except Exception as error:  # noqa: BLE001 (a report must not end the run)
    log.warning(
      '%s could not be written: %s: %s', NAME, type(error).__name__, error
    )
