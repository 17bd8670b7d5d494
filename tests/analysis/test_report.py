"""Tests of report.html: complete, self-contained, small and escaped."""

import base64
import html.parser
import json
import re

import cv2
import numpy as np
import pytest
from etils import epath

from vit_jax.analysis import report
from vit_jax.errors import UserError
from vit_jax.evaluators import confusion

EVIL = '<img src=x onerror="alert(1)">\'&"</script><script>x</script>'
EMPTY = {'img', 'meta'}
TIME = '2030-01-01T00:00:{:02d}+00:00'


class Checker(html.parser.HTMLParser):
  """Collects tags, attributes and text; every tag must be closed in order."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text, self.open = [], [], [], []
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    self.handle_startendtag(tag, attrs)
    if tag not in EMPTY:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def checked(text):
  """Parses a report; checks for external content, scripts and its size."""
  found = Checker(text)
  assert 'script' not in found.tags
  assert 'http' not in text
  assert not [name for name, _ in found.attributes if name.startswith('on')]
  sources = [v for name, v in found.attributes if name in ('src', 'href')]
  assert all(source.startswith('data:image/') for source in sources)
  assert len(text.encode()) < report.MAX_BYTES
  return found, ' '.join(''.join(found.text).split())


def charts(text):
  """Returns the SVG of each chart of a report."""
  found = re.findall(r'data:image/svg\+xml;base64,([^"]+)', text)
  return [base64.b64decode(data).decode() for data in found]


def paths(svg, colour):
  """Returns the data of the lines of a chart that have a colour."""
  return re.findall(rf'<path d="([^"]*)"[^>]*stroke: {colour}', svg)


CONFIG = {'total': '100 steps', 'batch_size': 8, 'train': {'num_examples': 80}}


def workdir(path, metrics=(), events=(), config=None, command=(), **run):
  path.mkdir(parents=True, exist_ok=True)
  run = {'command': ['python', *command], 'num_devices': 2, **run}
  events = [
    {'time': TIME.format(second), **event}
    for second, event in enumerate(events)
  ]
  for name, lines in (
    ('config.json', [config or CONFIG]),
    ('run.json', [run]),
    ('metrics.jsonl', metrics),
    ('events.jsonl', events),
  ):
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (path / name).write_text(text)
  return epath.Path(path)


def trained(path, losses, **options):
  lines = [
    {'step': 10 * (i + 1), 'loss': loss, 'lr': 1e-3, 'img_per_sec': 50.0}
    for i, loss in enumerate(losses)
  ]
  last = {'step': 10 * len(losses)}
  lines.append(last | {'test/accuracy': 0.5713, 'test/loss': 1.25})
  return workdir(path, lines, **options)


def rendered(folder):
  return checked(report.render(report.read(folder)))


def test_report_of_a_finished_run(tmp_path):
  """It contains numbers, flags and times, and a line per series."""
  spans = {
    'event': 'spans',
    'step': 100,
    'seconds': {'step': 60, 'compile': 20},
  }
  folder = trained(
    tmp_path / 'run',
    range(10, 0, -1),
    events=[{'event': 'start', 'step': 0}, spans],
    command=['--config=configs/cifar10.py', '--config.batch_size=8'],
  )
  found, text = rendered(folder)
  # progress, accuracy, goodput, other times, changed key, evaluator
  parts = '100 of 100', '57.13 %', '75.0 %', '25.0 %', 'batch_size', 'test/loss'
  assert all(part in text for part in parts)
  assert '0.57' not in text  # an accuracy is in percent everywhere
  assert found.tags.count('figure') == 4  # loss, accuracy, lr, images/s
  axes = [
    re.findall(r'>([\d.]+ ?%?)<', svg)
    for svg in charts(report.render(report.read(folder)))
  ]
  assert ['%' in ''.join(labels) for labels in axes] == [0, 1, 0, 0]


def test_best_values_depend_on_the_direction_of_a_metric(tmp_path):
  """Of equal values the last one is the best, as for `checkpoint.best`.

  Counts do not have a best value.
  """
  series = {
    'top5': (0.5, 0.8, 0.8, 0.7),
    'ece': (0.2, 0.1, 0.4, 0.4),
    'nll': (1.5, 1.25, 1.25, 2.5),
    'count': (90, 90, 90, 90),
  }
  lines = [
    {'step': 11 + i, **{f'test/{k}': each[i] for k, each in series.items()}}
    for i in range(4)
  ]
  config = {
    'evals': {'test': {'name': 'calibration'}},
    'checkpoint': {'best': 'test/top5'},
  }
  _, text = rendered(workdir(tmp_path / 'run', lines, config=config))
  for best in ('80.00 % at 13', '0.1 at 12', '1.25 at 13', 'top5, at step 13'):
    assert best in text
  assert '90 at' not in text and '0.8 ' not in text


def test_figures_are_shown_with_their_weights_and_images(tmp_path):
  """Older figures that were not drawn from the same weights are not shown."""
  folder = workdir(tmp_path / 'run')
  (folder / 'figures').mkdir()
  for name in ('rollout', 'heads'):
    (folder / 'figures' / f'{name}.png').write_bytes(b'\x89PNG')
  assert 'Single heads' in rendered(folder)[1]
  about = {'weights': 'step 7, _ema', 'images': EVIL, 'figures': ['rollout']}
  (folder / 'figures' / 'figures.json').write_text(json.dumps(about))
  _, text = rendered(folder)
  parts = 'step 7, _ema', EVIL, 'Attention rollout'
  assert all(part in text for part in parts) and 'Single heads' not in text


def test_report_of_a_run_with_nan_and_rollbacks(tmp_path):
  """Steps that are not finite are listed, marked, and not part of lines."""
  metrics = [{'step': s, 'loss': None if s == 3 else 1.0} for s in range(1, 6)]
  events = [
    {'event': 'start', 'step': 0},
    {'event': 'rollback', 'step': 2, 'from': 3, 'skip': [2], 'why': EVIL},
    {'event': 'bad_record', 'source': EVIL, 'index': 7},
    {'event': 'start', 'step': 2},
  ]
  folder = workdir(tmp_path / 'run', metrics, events)
  _, text = rendered(folder)
  assert re.search(r'not finite: loss at .* 3\.', text)
  assert all(part in text for part in ('start 2', 'rollback 1', 'bad_record 1'))
  (chart,) = charts(report.render(report.read(folder)))
  assert len(paths(chart, '#d55e00')) == 1  # the mark of the rollback
  (line,) = paths(chart, '#0072b2')
  assert len(re.findall('[ML]', line)) == 4 and 'nan' not in line


def test_report_of_a_run_without_metrics(tmp_path):
  found, _ = rendered(workdir(tmp_path / 'run'))
  assert 'img' not in found.tags
  with pytest.raises(UserError, match='other .*config.json.*metrics.jsonl'):
    report.read(epath.Path(tmp_path / 'other'))


def test_damaged_files_are_left_out(tmp_path):
  """Names that are not UTF-8 are shown escaped."""
  config = {'model': {'name': 'a\udcff'}}
  folder = workdir(tmp_path / 'run', [{'step': 1, 'loss': 2.0}], config=config)
  for name in ('run.json', 'events.jsonl', 'report.json'):
    (folder / name).write_text('{"torn')
  assert 'a\\udcff' in rendered(folder)[1]


def random_predictions(count, classes, names):
  """Returns the result of `predict_examples` for random predictions."""
  rng = np.random.default_rng(0)
  labels, predicted = rng.integers(0, classes, (2, count))
  images = rng.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
  shown = [report.picture(each, [names[0], f'is {EVIL}']) for each in images]
  return {
    'source': EVIL,
    'count': count,
    'total': count,
    'accuracy': 0.1,
    'examples': shown,
    'mistakes': shown,
    **confusion.summary(labels, predicted, names),
  }


def test_names_are_escaped(tmp_path):
  """Names of classes, files, metrics, flags, keys and workdirs are escaped."""
  names = [f'{EVIL}{i}' for i in range(4)]
  folder = workdir(
    tmp_path / '<b onclick=x>run',
    [{'step': 30, 'loss': 2.0, f'{EVIL}/accuracy': 0.5}],
    config={EVIL: EVIL, 'total': EVIL},
    command=[f'--config={EVIL}', f'--config.source.path={EVIL}'],
    device_kind=EVIL,
  )
  training = [report.picture(np.zeros((8, 8, 3), np.uint8), [EVIL])]
  judged = random_predictions(50, 4, names)
  values = {'step': 20, 'training': training, 'judged': judged}
  report.write_pictures(folder, values)
  found, text = rendered(folder)
  assert text.count(EVIL) > 60
  assert '<b onclick' not in found.tags and 'b onclick=x' in text


@pytest.mark.slow
def test_a_report_that_is_too_large_has_no_pictures(tmp_path, monkeypatch):
  folder = trained(tmp_path / 'run', [2.0])
  value = random_predictions(10, 3, ['a', 'b', 'c'])
  report.write_pictures(folder, {'step': 1, 'training': [], 'judged': value})
  assert 'Most confident mistakes' in rendered(folder)[1]
  monkeypatch.setattr(report, 'MAX_BYTES', 80_000)
  _, text = rendered(folder)
  assert 'mistakes' not in text and '57.13 %' in text


def test_a_report_that_cannot_be_written_does_not_raise(tmp_path, caplog):
  report.write(epath.Path(tmp_path / 'nowhere'))
  assert 'report.html' in caplog.text and 'UserError' in caplog.text
  folder = trained(tmp_path / 'run', [2.0])
  report.write(folder)
  checked((folder / 'report.html').read_text())


@pytest.mark.parametrize(
  ('side', 'kind', 'error'), [(20, 'png', 0), (400, 'jpeg', 6)]
)
def test_pictures_keep_their_colours(side, kind, error):
  pixels = np.zeros((side, side, 3), np.uint8)
  pixels[:] = 200, 100, 20
  src = report.picture(pixels, ['x'])['src']
  head, _, data = src.partition(',')
  assert kind in head
  array = np.frombuffer(base64.b64decode(data), np.uint8)
  decoded = cv2.imdecode(array, cv2.IMREAD_COLOR_RGB)
  assert max(decoded.shape) == min(side, 160)
  assert np.abs(decoded.astype(int) - [200, 100, 20]).max() <= error
