"""events.jsonl: what happened to a run, and where its time went.

Events are written at once. Spans of time (init, compile, restore, data_wait,
eval, save, and step for the rest) are summed and written with every line of
metrics, so a run that is killed loses little of its account. `summarise` reads
all of it, over every restart.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import time
import zlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from vit_jax.files import jsonl, paths
from vit_jax.files.outages import persistently

log = logging.getLogger('vit_jax')
PRODUCTIVE = 'step'
# A resumed run acts on these events, so they carry a checksum.
_SIGNED = ('rollback', 'config_change')
# Fields that readers of an event rely on.
_FIELDS: dict[str, dict[str, type]] = {
  'start': {'step': int},
  'spans': {'step': int, 'seconds': dict},
  'rollback': {'step': int, 'from': int, 'skip': list},
  'bad_record': {'source': str, 'index': int},
  'config_change': {'changes': dict},
}


class Ledger:
  """Appends events to a file and keeps account of time; one per process.

  Attributes:
    path: path of the file.
    totals: seconds so far by kind of span.
  """

  def __init__(self, path: epath.Path):
    """Opens the file; lines that are not events are quarantined.

    Args:
      path: path of the file, which is created with the first event.

    Raises:
      UserError: the file may not be read or written.
      StorageError: the storage is full or keeps failing.
    """
    self.path = path
    self._remote = paths.is_remote(path)
    self._lines: list[str] = []
    persistently(
      lambda: path.parent.mkdir(parents=True, exist_ok=True), path, 'written'
    )
    gone = jsonl.keep(path, is_event)
    if gone:
      log.warning(
        '%s: %d damaged line(s) moved to %s_set_aside.jsonl, the first %r; '
        'these events are not counted',
        path,
        len(gone),
        path.stem,
        gone[0][:100],
      )
    if self._remote:  # objects cannot be appended to
      self._lines = [line.decode() for line, _ in jsonl.read(path)]
    self.totals: dict[str, float] = {}
    self._flushed: dict[str, float] = {}
    self._begun = self._last_flush = time.perf_counter()

  def event(self, kind: str, **fields: Any) -> None:
    """Writes one event now.

    Args:
      kind: kind of event.
      **fields: its fields, JSON-able.

    Raises:
      UserError: the workdir is gone, or may not be written.
      StorageError: the storage is full or keeps failing.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    record = {'time': now, 'event': kind, **fields}
    if kind in _SIGNED:
      record['crc'] = _signature(record)
    line = json.dumps(record) + '\n'
    if not self._remote:
      jsonl.append(self.path, line)
      return
    self._lines.append(line)
    text = ''.join(self._lines)
    persistently(lambda: self.path.write_text(text), self.path, 'written')

  @contextlib.contextmanager
  def span(self, kind: str) -> Iterator[None]:
    """Times what happens inside; spans must not be nested.

    Args:
      kind: kind of span; the times of equal kinds are added up.
    """
    start = time.perf_counter()
    try:
      yield
    finally:
      elapsed = time.perf_counter() - start
      self.totals[kind] = self.totals.get(kind, 0.0) + elapsed

  def flush(self, step: int) -> None:
    """Writes the spans since the last flush.

    Args:
      step: number of updates completed.
    """
    now = time.perf_counter()
    spent = {
      kind: total - self._flushed.get(kind, 0.0)
      for kind, total in self.totals.items()
    }
    spent = {kind: seconds for kind, seconds in spent.items() if seconds > 0}
    # What is in no span is training itself.
    rest = now - self._last_flush - sum(spent.values())
    spent[PRODUCTIVE] = max(rest, 0.0)
    self._flushed, self._last_flush = dict(self.totals), now
    rounded = {kind: round(seconds, 3) for kind, seconds in spent.items()}
    self.event('spans', step=step, seconds=rounded)

  def elapsed_s(self) -> float:
    """Returns the seconds since this process began its account."""
    return time.perf_counter() - self._begun


@dataclasses.dataclass(frozen=True)
class Summary:
  """Where the time of a run went, over all its restarts.

  Attributes:
    seconds: seconds by kind; `step` is training that was kept, `lost` training
      that a restart had to repeat, `down` the time between two starts.
    starts: number of times that the run was started.
  """

  seconds: dict[str, float]
  starts: int

  @property
  def goodput(self) -> float:
    """Fraction of all time spent on training that was kept."""
    total = sum(self.seconds.values())
    return self.seconds.get(PRODUCTIVE, 0.0) / total if total else 0.0

  def line(self) -> str:
    """Returns one line: goodput, then the other kinds, the largest first."""
    total = sum(self.seconds.values()) or 1.0
    others = sorted(
      ((s, k) for k, s in self.seconds.items() if k != PRODUCTIVE), reverse=True
    )
    percent = [f'{kind} {100 * s / total:.1f}%' for s, kind in others if s > 0]
    return (
      f'goodput {100 * self.goodput:.1f}% of {total:,.0f} s in {self.starts} '
      f'start(s); the rest: {", ".join(percent) or "nothing"}'
    )


def read(path: epath.Path) -> list[dict[str, Any]]:
  """Reads all events in order; lines that are not events are left out.

  Args:
    path: path of events.jsonl; a missing file has no events.
  """
  return [
    record for _, record in jsonl.read(path) if record and is_event(record)
  ]


def is_event(record: dict[str, Any]) -> bool:
  """Returns whether an object is an event with all fields that readers use."""
  kind = record.get('event')
  try:
    moment = datetime.datetime.fromisoformat(record.get('time', ''))
  except (TypeError, ValueError):
    return False
  if not isinstance(kind, str) or moment.tzinfo is None:
    return False
  # `type`, not `isinstance`: True is an int too.
  if any(
    type(record.get(k)) is not t for k, t in _FIELDS.get(kind, {}).items()
  ):
    return False
  if kind == 'spans':
    return all(isinstance(s, int | float) for s in record['seconds'].values())
  if kind == 'rollback' and any(type(b) is not int for b in record['skip']):
    return False
  return record.get('crc', _signature(record)) == _signature(record)


def _signature(record: dict[str, Any]) -> int:
  """Computes the CRC-32 of an event, so that a changed digit is noticed."""
  rest = {k: v for k, v in record.items() if k != 'crc'}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def kept(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
  """Returns (step reached, seconds of training) of every span that was kept.

  Args:
    events: events of a run, in order.
  """
  spans: list[tuple[int, float]] = []
  for event in events:
    if event['event'] in ('start', 'rollback'):
      spans = [(step, s) for step, s in spans if step <= event['step']]
    if event['event'] == 'spans':
      spans.append((event['step'], event['seconds'].get(PRODUCTIVE, 0.0)))
  return spans


def summarise(events: list[dict[str, Any]]) -> Summary:
  """Adds up the spans of a run.

  Training beyond the step at which a run restarted had to be repeated: it
  counts as lost.

  Args:
    events: events of the run, in order.
  """
  seconds: dict[str, float] = {}
  kept: list[tuple[int, float]] = []  # (step reached, seconds of training)
  starts, last = 0, None

  def add(kind: str, value: float) -> None:
    seconds[kind] = seconds.get(kind, 0.0) + value

  for event in events:
    now = datetime.datetime.fromisoformat(event['time'])
    if event['event'] == 'start':
      starts += 1
      if last is not None:
        add('down', max((now - last).total_seconds(), 0.0))
    if event['event'] in ('start', 'rollback'):
      add('lost', sum(s for step, s in kept if step > event['step']))
      kept = [(step, s) for step, s in kept if step <= event['step']]
    if event['event'] == 'spans':
      for kind, value in event['seconds'].items():
        if kind == PRODUCTIVE:
          kept.append((event['step'], value))
        else:
          add(kind, value)
    last = now
  add(PRODUCTIVE, sum(s for _, s in kept))
  return Summary(seconds, starts)
