"""The sections of a run's page, made of what its workdir holds."""

import base64
import json
from collections import Counter
from typing import Any

from vit_jax.analysis.report import chart, html, record
from vit_jax.analysis.report.html import Html, number, tag
from vit_jax.analysis.report.record import Record
from vit_jax.analysis.style import FIGURES
from vit_jax.config.completion import flatten
from vit_jax.run import ledger

_EVENTS = 40  # shown, the last ones
_LOWER = ('loss', 'nll', 'ece')  # results of which the lowest is the best
_NEITHER = ('count', 'left_out', 'lr', 'l2')  # no better and no worse
_FIELD = 300  # characters shown of one event or value
_OF = ('weights', 'images')  # what figures may differ in
TITLES = {  # of charts of training metrics
  'lr': 'learning rate',
  'img_per_sec': 'images per second',
  'data_wait': 'share of time waiting for data',
  'grad_norm': 'norm of the gradient',
  'mfu': 'model FLOPs utilisation',
}
_QUIET = ('spans',)  # events that the bar of time shows


def overview(run: Record) -> Html:
  """Shows the progress of the run and its latest values."""
  total = run.total_steps
  progress = f'{run.step:,}' + (f' of {total:,}' if total else '')
  tiles = [('step', progress)]
  for name in run.evaluations:
    if name.endswith('/accuracy'):
      tiles.append((name, f'{100 * run.series[name][1][-1]:.2f} %'))
  best = run.config.get('checkpoint', {}).get('best')
  if best in run.evaluations:
    # The later of two equal values, as `checkpoint.best` chooses.
    steps, values = run.series[best]
    value, step = max(zip(values, steps, strict=True))
    text = f'best {best}, at step {step:,} (--step=best)'
    tiles.append((text, f'{value:.4f}'))
  for name, label in (
    ('loss', 'training loss, last logged batch'),
    ('img_per_sec', 'images/s, since the line before'),
  ):
    if name in run.series:
      tiles.append((label, number(run.series[name][1][-1], 4)))
  summary = ledger.summarise(run.events)
  if summary.seconds:
    tiles.append(('goodput', f'{100 * summary.goodput:.1f} %'))
  paper = run.config.get('paper_core_days')
  devices = run.run.get('num_devices')
  if isinstance(devices, int) and summary.seconds:
    days = summary.seconds.get(ledger.PRODUCTIVE, 0.0) * devices / 86400
    label = 'device-days of training'
    label += f' (paper: {number(paper)} TPUv3-core-days)' if paper else ''
    tiles.append((label, number(days, 3)))
  return tag(
    'div',
    *(
      tag('div', tag('b', value), name, class_='tile') for name, value in tiles
    ),
    class_='tiles',
  )


def what_ran(run: Record) -> Html:
  """Config file and flags, code, machine; the whole config folded away."""
  about, packages = run.run, run.run.get('packages')
  rows = [('config', record.flag(run.command, 'config') or 'unknown')]
  for key, value in record.changes(run.command).items():
    rows.append((f'changed: {key}', value[:_FIELD]))
  rows += [('commit', about['commit'])] if about.get('commit') else []
  if isinstance(packages, dict):
    known = (
      f'{name} {version}' for name, version in packages.items() if version
    )
    rows.append(
      ('versions', f'Python {about.get("python")}, ' + ', '.join(known))
    )
  if about.get('device_kind'):
    devices = f'{about.get("num_devices")} × {about["device_kind"]}'
    rows.append(
      ('devices', f'{devices}, {about.get("num_processes")} process(es)')
    )
  rows += [('last start', about['time'])] if about.get('time') else []
  if run.command:
    rows.append(('command', tag('code', ' '.join(run.command)[:2000])))
  text = json.dumps(run.config, indent=1, ensure_ascii=False)
  folded = tag('details', tag('summary', 'the whole config'), tag('pre', text))
  return html.join([html.table(('', ''), rows), folded])


def curves(run: Record) -> Html:
  """Losses, other results, learning rate, speed, gradient."""
  series = run.series
  groups: dict[str, list[str]] = {'loss': ['loss']}
  for name in run.evaluations:
    kind = name.rpartition('/')[2]
    if kind != 'count':
      groups.setdefault(kind, []).append(name)
  groups |= {title: [name] for name, title in TITLES.items()}
  marks = [e['from'] for e in run.events if e['event'] == 'rollback']
  drawn = [
    chart.lines(
      title, {n: series[n] for n in names if n in series}, marks=marks
    )
    for title, names in groups.items()
  ]
  if not any(drawn):
    return tag('p', 'No numbers have been written yet.', class_='soft')
  return tag('div', *drawn, class_='charts')


def results(run: Record) -> Html:
  """Shows the last, best and expected values of each evaluation."""
  expected = Html('')
  if run.expected:
    changed = len(record.changes(run.command))
    of = (
      f' (as it stands; this run changed {changed} key(s))' if changed else ''
    )
    text = f'The config’s header expects{of}: '
    expected = tag('p', text, tag('b', run.expected))
  if not run.evaluations:
    return html.join(
      [tag('p', 'There was no evaluation yet.', class_='soft'), expected]
    )
  rows = []
  for name in run.evaluations:
    steps, values = run.series[name]
    kind = name.rpartition('/')[2]
    best = (min if kind in _LOWER else max)(values)
    at = steps[values.index(best)]
    best_cell = '' if kind in _NEITHER else f'{number(best)} at {at:,}'
    rows.append((name, number(values[-1]), f'{steps[-1]:,}', best_cell))
  table = html.table(('metric', 'last', 'at step', 'best'), rows, numbers=3)
  return html.join([table, expected])


def events(run: Record) -> Html:
  """Shows where time was spent, and restarts, rollbacks and bad records."""
  parts = [chart.shares(ledger.summarise(run.events).seconds)]
  if run.nulls:
    steps = sorted({step for step, _ in run.nulls})
    names = ', '.join(sorted({name for _, name in run.nulls}))
    shown = ', '.join(f'{step:,}' for step in steps[:20])
    more = f' and {len(steps) - 20} more' if len(steps) > 20 else ''
    text = f'Not finite: {names} at step(s) {shown}{more}.'
    parts.append(tag('p', text, class_='bad'))
  told = [e for e in run.events if e['event'] not in _QUIET]
  counts = Counter(event['event'] for event in told)
  if counts:
    text = ', '.join(
      f'{kind} {count:,}' for kind, count in counts.most_common()
    )
    parts.append(tag('p', f'Events: {text}.'))
  rows = []
  for event in told[-_EVENTS:]:
    rest = {k: v for k, v in event.items() if k not in ('time', 'event', 'crc')}
    fields = json.dumps(rest, ensure_ascii=False)[:_FIELD]
    rows.append((event['time'], event['event'], fields))
  if len(told) > _EVENTS:
    parts.append(tag('p', f'The last {_EVENTS}:', class_='soft'))
  if rows:
    parts.append(html.table(('time', 'event', ''), rows))
  return html.join(parts)


def figures(run: Record) -> Html:
  """Shows the figures, and the weights from which they were drawn."""
  drawn = []
  for name, content in run.figures.items():
    data = base64.b64encode(content).decode()
    caption = FIGURES[name]
    image = tag('img', src=f'data:image/png;base64,{data}', alt=caption)
    drawn.append(tag('figure', image, tag('figcaption', caption)))
  if not drawn:
    return Html('')
  about = [f'{k}: {run.figures_of.get(k) or "unknown"}' for k in _OF]
  note = (
    f'Of {"; ".join(about)}. Attention distance is the mean of them all, the '
    'others show the first few.'
  )
  shown = tag('div', *drawn, class_='figures')
  return html.join([tag('p', note, class_='soft'), shown])


def pictures(entries: list[dict[str, Any]]) -> Html:
  """Images with their captions; see `parts.picture`."""
  shown = []
  for entry in entries:
    lines = [tag('div', line) for line in entry['caption']]
    image = tag(
      'img', src=entry['src'], alt=entry['caption'][0], loading='lazy'
    )
    shown.append(tag('figure', image, tag('figcaption', *lines)))
  return tag('div', *shown, class_='pictures')


def predictions(parts: dict[str, Any]) -> Html:
  """Shows predictions for examples of an evaluation and confident mistakes."""
  judged = parts.get('judged')
  if not judged:
    return Html('')
  of = f'{judged["count"]:,} of {judged["total"]:,}'
  note = (
    f'{of} examples of {judged["source"]} at step {parts["step"]:,}: '
    f'{100 * judged["accuracy"]:.2f} % right, by the weights themselves (no '
    'average, no teacher). Confidence is the largest probability by soft-max.'
  )
  body = [tag('h2', 'Predictions'), tag('p', note, class_='soft')]
  body.append(pictures(judged['examples']))
  if judged['mistakes']:
    body += [tag('h2', 'Most confident mistakes'), pictures(judged['mistakes'])]
  body += [tag('h2', 'What is taken for what')]
  if judged['matrix']:
    body.append(chart.matrix(judged['matrix'], judged['names']))
  if judged['confused']:
    head = ('true', 'predicted', 'examples', 'of that class')
    body.append(html.table(head, judged['confused'], numbers=2))
  if judged['worst']:
    body.append(tag('p', 'Classes with the lowest accuracy:', class_='soft'))
    head = ('class', 'right', 'examples')
    body.append(html.table(head, judged['worst'], numbers=2))
  return html.join(body)


def config_differences(several: list[Record]) -> Html:
  """Keys in which the configs of several runs differ."""
  flat = [flatten(run.config) for run in several]
  keys = sorted(set().union(*flat))
  absent = object()
  rows = []
  for key in keys:
    values = [f.get(key, absent) for f in flat]
    if any(value != values[0] for value in values):
      shown = ['–' if v is absent else str(v)[:_FIELD] for v in values]
      rows.append((key, *shown))
  if not rows:
    return tag('p', 'Their configs are the same.', class_='soft')
  return html.table(('key', *(run.name for run in several)), rows)
