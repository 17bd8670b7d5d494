"""events.jsonl: what happened to a run, and where its time went.

Events are written at once; spans (init, compile, restore, data_wait, eval, save
and, for what is left, step) are summed and written with every line of metrics,
so a run that is killed loses little of its account. `summarise` reads it all,
over every restart.
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

log = logging.getLogger('vit_jax')
PRODUCTIVE = 'step'
_SIGNED = ('rollback', 'config_change')  # what a resumed run goes by
# What readers of an event count on.
_FIELDS: dict[str, dict[str, type]] = {
  'start': {'step': int},
  'spans': {'step': int, 'seconds': dict},
  'rollback': {'step': int, 'from': int, 'skip': list},
  'bad_record': {'source': str, 'index': int},
  'config_change': {'changes': dict},
}


class Ledger:
  """Appends to one file and keeps time; each process has its own."""

  def __init__(self, path: epath.Path):
    """Lines that are no event, of a crash or by hand, are moved aside.

    Raises:
      UserError: the file cannot be read or written.
    """
    self.path = path
    self._remote = paths.is_remote(path)
    self._lines: list[str] = []
    with jsonl.access(path, 'written'):
      path.parent.mkdir(parents=True, exist_ok=True)
    gone = jsonl.keep(path, is_event)
    if gone:
      log.warning(
        '%s: %d damaged line(s) moved to %s_set_aside.jsonl, the first %r; '
        'what they said is not counted',
        path,
        len(gone),
        path.stem,
        gone[0][:100],
      )
    if self._remote and path.exists():
      self._lines = path.read_text().splitlines(keepends=True)
    self.totals: dict[str, float] = {}
    self._flushed: dict[str, float] = {}
    self._begun = self._last_flush = time.perf_counter()

  def event(self, kind: str, **fields: Any) -> None:
    """Writes one event now.

    Raises:
      UserError: it cannot be written; the disk is full or the workdir gone.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    record = {'time': now, 'event': kind, **fields}
    if kind in _SIGNED:
      record['crc'] = _signature(record)
    line = json.dumps(record) + '\n'
    with jsonl.access(self.path, 'written'):
      if self._remote:
        self._lines.append(line)
        self.path.write_text(''.join(self._lines))
      else:
        with self.path.open('a') as file:
          file.write(line)

  @contextlib.contextmanager
  def span(self, kind: str) -> Iterator[None]:
    """Times what happens inside; spans do not nest."""
    start = time.perf_counter()
    try:
      yield
    finally:
      elapsed = time.perf_counter() - start
      self.totals[kind] = self.totals.get(kind, 0.0) + elapsed

  def flush(self, step: int) -> None:
    """Writes the spans since the last flush; `step` updates are complete."""
    now = time.perf_counter()
    spent = {
      kind: total - self._flushed.get(kind, 0.0)
      for kind, total in self.totals.items()
    }
    spent = {kind: seconds for kind, seconds in spent.items() if seconds > 0}
    rest = now - self._last_flush - sum(spent.values())
    spent[PRODUCTIVE] = max(rest, 0.0)
    self._flushed, self._last_flush = dict(self.totals), now
    rounded = {kind: round(seconds, 3) for kind, seconds in spent.items()}
    self.event('spans', step=step, seconds=rounded)

  def elapsed_s(self) -> float:
    """Seconds since this process began its account."""
    return time.perf_counter() - self._begun


@dataclasses.dataclass(frozen=True)
class Summary:
  """Where the time of a run went, over all its restarts.

  Attributes:
    seconds: by kind; `step` is training that was kept, `lost` training that a
      restart had to repeat, `down` the time between two starts.
    starts: how often the run was started.
  """

  seconds: dict[str, float]
  starts: int

  @property
  def goodput(self) -> float:
    """Share of all the time that went into training that was kept."""
    total = sum(self.seconds.values())
    return self.seconds.get(PRODUCTIVE, 0.0) / total if total else 0.0

  def line(self) -> str:
    """One line: goodput, then the other kinds, the largest first."""
    total = sum(self.seconds.values()) or 1.0
    others = sorted(
      ((s, k) for k, s in self.seconds.items() if k != PRODUCTIVE), reverse=True
    )
    shares = [f'{kind} {100 * s / total:.1f}%' for s, kind in others if s > 0]
    return (
      f'goodput {100 * self.goodput:.1f}% of {total:,.0f} s in {self.starts} '
      f'start(s); the rest: {", ".join(shares) or "nothing"}'
    )


def read(path: epath.Path) -> list[dict[str, Any]]:
  """All events in order; lines that are none are left out."""
  return [
    record for _, record in jsonl.read(path) if record and is_event(record)
  ]


def is_event(record: dict[str, Any]) -> bool:
  """Whether an object is an event with all that its readers count on."""
  kind = record.get('event')
  try:
    moment = datetime.datetime.fromisoformat(record.get('time', ''))
  except (TypeError, ValueError):
    return False
  if not isinstance(kind, str) or moment.tzinfo is None:
    return False
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
  """Of an event whose numbers matter, so that a changed digit is noticed."""
  rest = {k: v for k, v in record.items() if k != 'crc'}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def kept(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
  """(step reached, seconds of training) of every span that was kept."""
  spans: list[tuple[int, float]] = []
  for event in events:
    if event['event'] in ('start', 'rollback'):
      spans = [(step, s) for step, s in spans if step <= event['step']]
    if event['event'] == 'spans':
      spans.append((event['step'], event['seconds'].get(PRODUCTIVE, 0.0)))
  return spans


def summarise(events: list[dict[str, Any]]) -> Summary:
  """Adds up spans; what was trained beyond a restart's step counts as lost."""
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
