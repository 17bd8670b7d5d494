"""Sections of the HTML report of a run."""

import base64
import json
from collections import Counter
from typing import Any
from xml.etree.ElementTree import Element

from vit_jax.analysis.report import chart, html, record
from vit_jax.analysis.report.html import number, tag
from vit_jax.analysis.report.record import Record
from vit_jax.analysis.style import FIGURES
from vit_jax.config.completion import flatten
from vit_jax.run import ledger

_EVENTS = 40  # maximum number of events shown
_LOWER = ('loss', 'nll', 'ece')  # results for which lower values are better
_NEITHER = ('count', 'left_out', 'lr', 'l2')  # values without a best one
_FIELD = 300  # maximum number of characters shown of an event or a value
_DRAWN_FROM = ('weights', 'images')  # keys of the description of the figures
TITLES = {  # titles of the charts of training metrics
  'lr': 'learning rate',
  'img_per_sec': 'images per second',
  'data_wait': 'fraction of time waiting for data',
  'grad_norm': 'gradient norm',
  'mfu': 'model FLOPs utilisation',
}
_QUIET = ('spans',)  # events that the bar of times already represents


def overview(run: Record) -> Element:
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
    ('img_per_sec', 'images/s, last logged interval'),
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
    label += f' (paper: {number(paper)} TPUv3 core-days)' if paper else ''
    tiles.append((label, number(days, 3)))
  return tag(
    'div',
    *(
      tag('div', tag('b', value), name, class_='tile') for name, value in tiles
    ),
    class_='tiles',
  )


def what_ran(run: Record) -> Element:
  """Shows the config file, flags, code version, machine and full config."""
  about, packages = run.run, run.run.get('packages')
  rows: list[Any] = [
    ('config', record.flag(run.command, 'config') or 'unknown')
  ]
  for key, value in record.changes(run.command).items():
    rows.append((f'changed: {key}', value[:_FIELD]))
  rows += [('commit', about['commit'])] if about.get('commit') else []
  if isinstance(packages, dict):
    versions = (
      f'{name} {version}' for name, version in packages.items() if version
    )
    rows.append(
      ('versions', f'Python {about.get("python")}, ' + ', '.join(versions))
    )
  if about.get('device_kind'):
    devices = f'{about.get("num_devices")} × {about["device_kind"]}'
    rows.append(
      ('devices', f'{devices}, {about.get("num_processes")} process(es)')
    )
  rows += [('last started', about['time'])] if about.get('time') else []
  if run.command:
    rows.append(('command', tag('code', ' '.join(run.command)[:2000])))
  text = json.dumps(run.config, indent=1, ensure_ascii=False)
  folded = tag('details', tag('summary', 'full config'), tag('pre', text))
  return tag('div', html.table(('', ''), rows), folded)


def curves(run: Record) -> Element:
  """Draws losses, other results, learning rate, speed and gradient norm."""
  series = run.series
  groups: dict[str, list[str]] = {'loss': ['loss']}
  for name in run.evaluations:
    kind = name.rpartition('/')[2]
    if kind != 'count':
      groups.setdefault(kind, []).append(name)
  groups |= {title: [name] for name, title in TITLES.items()}
  marks = [e['from'] for e in run.events if e['event'] == 'rollback']
  drawn = tag('div', class_='charts')
  for title, names in groups.items():
    shown = {name: series[name] for name in names if name in series}
    figure = chart.lines(title, shown, marks=marks)
    if figure is not None:
      drawn.append(figure)
  if not len(drawn):
    return tag('p', 'No metrics have been logged yet.', class_='soft')
  return drawn


def results(run: Record) -> Element:
  """Shows the last, best and expected values of each evaluation."""
  expected = None
  if run.expected:
    changed = len(record.changes(run.command))
    note = f' (this run changed {changed} of its keys)' if changed else ''
    text = f'Expected according to the config file{note}: '
    expected = tag('p', text, tag('b', run.expected))
  if not run.evaluations:
    note = tag('p', 'The run has not been evaluated yet.', class_='soft')
    return tag('div', note, expected)
  rows = []
  for name in run.evaluations:
    steps, values = run.series[name]
    kind = name.rpartition('/')[2]
    best = (min if kind in _LOWER else max)(values)
    at = steps[values.index(best)]
    best_cell = '' if kind in _NEITHER else f'{number(best)} at {at:,}'
    rows.append((name, number(values[-1]), f'{steps[-1]:,}', best_cell))
  table = html.table(('metric', 'last', 'at step', 'best'), rows, numbers=3)
  return tag('div', table, expected)


def events(run: Record) -> Element:
  """Shows the use of time, and restarts, rollbacks and bad records."""
  parts = [chart.fractions(ledger.summarise(run.events).seconds)]
  if run.nulls:
    steps = sorted({step for step, _ in run.nulls})
    names = ', '.join(sorted({name for _, name in run.nulls}))
    shown = ', '.join(f'{step:,}' for step in steps[:20])
    more = f' and {len(steps) - 20} more' if len(steps) > 20 else ''
    text = f'Values that are not finite: {names} at step(s) {shown}{more}.'
    parts.append(tag('p', text, class_='bad'))
  listed = [e for e in run.events if e['event'] not in _QUIET]
  counts = Counter(event['event'] for event in listed)
  if counts:
    text = ', '.join(
      f'{kind} {count:,}' for kind, count in counts.most_common()
    )
    parts.append(tag('p', f'Events: {text}.'))
  rows = []
  for event in listed[-_EVENTS:]:
    hidden = ('time', 'event', 'crc')
    fields = {k: v for k, v in event.items() if k not in hidden}
    text = json.dumps(fields, ensure_ascii=False)[:_FIELD]
    rows.append((event['time'], event['event'], text))
  if len(listed) > _EVENTS:
    parts.append(tag('p', f'The last {_EVENTS} events:', class_='soft'))
  if rows:
    parts.append(html.table(('time', 'event', ''), rows))
  return tag('div', *parts)


def figures(run: Record) -> Element | None:
  """Shows the figures, and the weights from which they were drawn."""
  drawn = []
  for name, content in run.figures.items():
    data = base64.b64encode(content).decode()
    caption = FIGURES[name]
    image = tag('img', src=f'data:image/png;base64,{data}', alt=caption)
    drawn.append(tag('figure', image, tag('figcaption', caption)))
  if not drawn:
    return None
  about = [f'{k}: {run.figures_of.get(k) or "unknown"}' for k in _DRAWN_FROM]
  note = (
    f'Drawn from {"; ".join(about)}. The attention distance is a mean over all '
    'images; the other figures show the first few.'
  )
  shown = tag('div', *drawn, class_='figures')
  return tag('div', tag('p', note, class_='soft'), shown)


def pictures(entries: list[dict[str, Any]]) -> Element:
  """Shows images with their captions; see `parts.picture`."""
  shown = []
  for entry in entries:
    lines = [tag('div', line) for line in entry['caption']]
    image = tag(
      'img', src=entry['src'], alt=entry['caption'][0], loading='lazy'
    )
    shown.append(tag('figure', image, tag('figcaption', *lines)))
  return tag('div', *shown, class_='pictures')


def predictions(parts: dict[str, Any]) -> Element | None:
  """Shows predictions for evaluated examples, errors and confusions."""
  values = parts.get('judged')
  if not values:
    return None
  examples = f'{values["count"]:,} of {values["total"]:,} examples'
  note = (
    f'{examples} of {values["source"]} at step {parts["step"]:,}: accuracy '
    f'{100 * values["accuracy"]:.2f} %, with the trained weights (not their '
    'average or a teacher). Confidence is the largest softmax probability.'
  )
  body = [tag('h2', 'Predictions'), tag('p', note, class_='soft')]
  body.append(pictures(values['examples']))
  if values['mistakes']:
    body += [tag('h2', 'Most confident mistakes'), pictures(values['mistakes'])]
  body += [tag('h2', 'Confusion of classes')]
  if values['matrix']:
    body.append(chart.matrix(values['matrix'], values['names']))
  if values['confused']:
    head = ('true class', 'predicted class', 'examples', 'fraction of class')
    body.append(html.table(head, values['confused'], numbers=2))
  if values['worst']:
    body.append(tag('p', 'Classes with the lowest accuracy:', class_='soft'))
    head = ('class', 'accuracy', 'examples')
    body.append(html.table(head, values['worst'], numbers=2))
  return tag('div', *body)


def config_differences(several: list[Record]) -> Element:
  """Shows the keys in which the configs of several runs differ."""
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
    return tag('p', 'The configs are identical.', class_='soft')
  return html.table(('key', *(run.name for run in several)), rows)
