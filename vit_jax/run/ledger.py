"""Writes events.jsonl: the events of a run, and how its time was spent.

Events are written at once; each bad record is written only once over all
restarts. Spans of time (init, compile, restore, data_wait, eval, save, report,
and step for all other time) are summed and written with every line of metrics,
so a run that is killed loses little of them. `summarise` adds up the spans of
all restarts.
"""

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from vit_jax.data.pipeline import stream
from vit_jax.files import jsonl
from vit_jax.files.paths import with_retries

PRODUCTIVE = 'step'
FINISHED = 'finished'  # the last event of a run that has nothing left to do
# Fields, and their types, that the readers of an event use.
_FIELDS: dict[str, dict[str, type]] = {
  'start': {'step': int},
  'spans': {'step': int, 'seconds': dict},
  'rollback': {'step': int, 'from': int, 'skip': list},
  'bad_record': {'source': str, 'index': int},
  'branch': {'step': int},
  FINISHED: {'step': int, 'metrics': list},
}


class Ledger:
  """Appends events to a file and keeps account of time; one per process.

  Attributes:
    path: path of the file.
    totals: seconds so far by kind of span.
  """

  def __init__(self, path: epath.Path):
    """Opens the file, and moves lines that are not events to another file.

    Args:
      path: path of the file, which is created with the first event.

    Raises:
      UserError: there is no permission to read or write the file.
      StorageError: the storage is full or keeps failing.
    """
    self.path = path
    with_retries(
      lambda: path.parent.mkdir(parents=True, exist_ok=True), path, 'written'
    )
    jsonl.keep(path, is_event)
    self._file = jsonl.Appender(path)
    self.totals: dict[str, float] = {}
    self._flushed: dict[str, float] = {}
    self._start = self._last_flush = time.perf_counter()

  def event(self, kind: str, **fields: Any) -> None:
    """Writes one event.

    Args:
      kind: kind of event.
      **fields: fields of the event, JSON-able.

    Raises:
      UserError: the workdir was removed, or there is no permission to write it.
      StorageError: the storage is full or keeps failing.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    self._file.append({'time': now, 'event': kind, **fields})
    self._file.upload()

  @contextlib.contextmanager
  def span(self, kind: str) -> Iterator[None]:
    """Times the body of a `with` statement; spans must not be nested.

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
    # Time outside all spans is training itself.
    training_s = now - self._last_flush - sum(spent.values())
    spent[PRODUCTIVE] = max(training_s, 0.0)
    self._flushed, self._last_flush = dict(self.totals), now
    rounded = {kind: round(seconds, 3) for kind, seconds in spent.items()}
    self.event('spans', step=step, seconds=rounded)

  def elapsed_s(self) -> float:
    """Returns the seconds since this ledger was opened."""
    return time.perf_counter() - self._start

  def steps_s(self) -> float:
    """Returns the seconds spent on steps, including the wait for data."""
    others = (s for kind, s in self.totals.items() if kind != 'data_wait')
    return self.elapsed_s() - sum(others)


@dataclasses.dataclass(frozen=True)
class Summary:
  """Time of a run by kind of use, summed over all restarts.

  Attributes:
    seconds: seconds by kind of span. `step` is training whose result was kept,
      `lost` is training that a restart repeated, and `down` is the time between
      the end of one process and the start of the next.
    starts: number of times that the run was started.
  """

  seconds: dict[str, float]
  starts: int

  @property
  def goodput(self) -> float:
    """Time of training whose result was kept, over all time of the run."""
    total = sum(self.seconds.values())
    return self.seconds.get(PRODUCTIVE, 0.0) / total if total else 0.0

  def line(self) -> str:
    """Returns a line with the goodput and the other kinds, largest first."""
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
  fields = _FIELDS.get(kind, {})
  if not all(isinstance(record.get(name), fields[name]) for name in fields):
    return False
  if kind == 'spans':
    return all(isinstance(s, int | float) for s in record['seconds'].values())
  skipped = record['skip'] if kind == 'rollback' else ()
  return all(isinstance(batch, int) for batch in skipped)


def finished(events: list[dict[str, Any]]) -> dict[str, Any] | None:
  """Returns the event `finished` of a run that is over; otherwise None.

  If the run was started again since, even if that was killed at once, an event
  `start` follows, and the run is not over.

  Args:
    events: events of the run, in order.
  """
  for event in reversed(events):
    if event['event'] in ('start', FINISHED):
      return event if event['event'] == FINISHED else None
  return None


def training_spans(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
  """Returns the spans of training that no restart or rollback discarded.

  A span is the time between two `spans` events.

  Args:
    events: events of a run, in order.

  Returns:
    Pairs (step at the end of the span, seconds of productive training).
  """
  spans: list[tuple[int, float]] = []
  for event in events:
    if event['event'] in ('start', 'rollback'):  # later steps are repeated
      spans = [(step, s) for step, s in spans if step <= event['step']]
    if event['event'] == 'spans':
      spans.append((event['step'], event['seconds'].get(PRODUCTIVE, 0.0)))
  return spans


def summarise(events: list[dict[str, Any]]) -> Summary:
  """Adds up the spans of a run.

  Training after the step at which the run restarted was repeated, and counts as
  lost.

  Args:
    events: events of the run, in order.
  """
  seconds: dict[str, float] = {}
  starts, last_start = 0, None
  times: list[datetime.datetime] = []

  def add(kind: str, value: float) -> None:
    seconds[kind] = seconds.get(kind, 0.0) + value

  for event in events:
    now = datetime.datetime.fromisoformat(event['time'])
    if event['event'] == 'start':
      # `start` follows the initialization. After a rollback, it is written
      # again by the same process.
      opened = now - datetime.timedelta(seconds=event.get('elapsed_s', 0.0))
      if last_start is None or last_start < opened:
        starts += 1
        before = [time for time in times if time <= opened]
        if before:
          add('down', (opened - before[-1]).total_seconds())
      last_start = now
    if event['event'] == 'spans':
      for kind, value in event['seconds'].items():
        add(kind, value)
    times.append(now)
  kept = sum(s for _, s in training_spans(events))
  # Spans are rounded to milliseconds, see `Ledger.flush`.
  lost = round(seconds.get(PRODUCTIVE, 0.0) - kept, 3)
  return Summary(seconds | {PRODUCTIVE: kept, 'lost': lost}, starts)


def report_to(ledger: Ledger | None) -> stream.Report:
  """Returns a function that writes an event for each new bad record.

  Args:
    ledger: destination of the events; None to write no events.

  Returns:
    The function; None if there is no ledger.
  """
  if ledger is None:
    return None
  listed = {
    (event['source'], event['index'])
    for event in read(ledger.path)
    if event['event'] == 'bad_record'
  }

  def report(source: str, record: stream.BadRecord) -> None:
    if (source, record.index) not in listed:
      listed.add((source, record.index))
      ledger.event('bad_record', source=source, **record._asdict())

  return report
