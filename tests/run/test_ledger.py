"""Tests of the accounting of time over restarts and rollbacks."""

import json
import time

import pytest
from etils import epath

from vit_jax.run import ledger


def _event(second: int, kind: str, **fields):
  return {
    'time': f'2026-01-01T00:{second // 60:02d}:{second % 60:02d}+00:00',
    'event': kind,
    **fields,
  }


def test_lost_and_down_time():
  """Steps after the restored one are lost; gaps between runs are down time."""
  events = [
    _event(0, 'start', step=0),
    _event(30, 'spans', step=100, seconds={'init': 5.0, 'step': 25.0}),
    _event(60, 'spans', step=200, seconds={'save': 2.0, 'step': 28.0}),
    _event(100, 'start', step=100),
    _event(130, 'spans', step=200, seconds={'init': 4.0, 'step': 26.0}),
  ]
  summary = ledger.summarise(events)
  assert summary.starts == 2
  assert summary.seconds == {
    'init': 9.0,
    'save': 2.0,
    'down': 40.0,
    'lost': 28.0,
    'step': 51.0,
  }
  assert summary.goodput == pytest.approx(51 / 130)
  assert summary.line().startswith('goodput 39.2% of 130 s in 2 start(s)')
  assert 'down 30.8%, lost 21.5%' in summary.line()


def test_start_is_written_after_the_initialization():
  """Its time is not down time; a rollback in the same process is no start."""
  events = [
    _event(5, 'start', step=0, elapsed_s=5.0),
    _event(30, 'spans', step=100, seconds={'init': 5.0, 'step': 25.0}),
    _event(44, 'kernel_check', step=0),
    _event(50, 'start', step=100, elapsed_s=10.0),
    _event(60, 'spans', step=150, seconds={'init': 10.0, 'step': 10.0}),
    _event(61, 'rollback', **{'from': 150, 'step': 100, 'skip': []}),
    _event(63, 'start', step=100, elapsed_s=23.0),
    _event(70, 'spans', step=200, seconds={'restore': 3.0, 'step': 7.0}),
  ]
  summary = ledger.summarise(events)
  assert summary.starts == 2 and summary.seconds['down'] == 10.0
  assert sum(summary.seconds.values()) == 70.0


def test_spans_add_up_to_the_elapsed_time(tmp_path):
  """Time outside of spans is training; nothing is counted twice."""
  book = ledger.Ledger(epath.Path(tmp_path) / 'events.jsonl')
  book.event('start', step=0)
  for step in (3, 6):
    with book.span('eval'):
      time.sleep(0.01)
    book.flush(step)
  events = ledger.read(book.path)
  assert [e['event'] for e in events] == ['start', 'spans', 'spans']
  total = sum(sum(e['seconds'].values()) for e in events[1:])
  assert total == pytest.approx(book.elapsed_s(), abs=0.05)


def test_damaged_lines_are_moved_at_the_start(tmp_path):
  """The next event begins a new line, and no event is lost."""
  path = epath.Path(tmp_path) / 'events.jsonl'
  good = [_event(0, 'start', step=0), _event(1, 'note', anything=[1])]
  bad = [
    [],
    3,
    {'event': 'start', 'step': 0},
    {'event': 'start', 'step': 0, 'time': 7},
    {'event': ['start'], 'step': 0, 'time': '2026-01-01T00:00:00+00:00'},
    {'event': 'start', 'step': 0, 'time': '2026-01-01T00:00:00'},
    _event(2, 'start'),
    _event(2, 'spans', step=3, seconds=[1]),
    _event(2, 'spans', step=3, seconds={'step': 'long'}),
    _event(2, 'rollback', **{'from': 3, 'step': 1, 'skip': ['5']}),
    _event(2, 'bad_record', source='x'),
  ]
  lines = [json.dumps(each) for each in [*good, *bad]]
  path.write_text('\n'.join(lines) + '\n{"time": "2026')
  book = ledger.Ledger(path)
  book.event('start', step=5)
  assert ledger.read(path)[:2] == good and len(ledger.read(path)) == 3
  aside = (tmp_path / 'events_set_aside.jsonl').read_text().splitlines()
  assert aside == [*lines[2:], '{"time": "2026']
  assert ledger.summarise(ledger.read(path)).starts == 2
