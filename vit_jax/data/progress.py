"""Reports the progress of long operations on stderr.

A terminal shows a progress bar, other outputs such as log files plain lines.
"""

import contextlib
import contextvars
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar('T')
_QUIET_S = 1.0  # minimum duration of operations that are reported
_LINE_S = 10.0  # interval between two lines of a log
_DRAW_S = 0.2  # interval between two updates of a progress bar
_WIDTH = 24  # number of characters of a progress bar
_LISTENER: contextvars.ContextVar[Callable[[], None]] = contextvars.ContextVar(
  'listener', default=lambda: None
)


@contextlib.contextmanager
def reported_to(listener: Callable[[], None]) -> Iterator[None]:
  """Calls `listener` whenever the code in the `with` block makes progress.

  Args:
    listener: function that is called in the thread that does the work.
  """
  token = _LISTENER.set(listener)
  try:
    yield
  finally:
    _LISTENER.reset(token)


def made() -> None:
  """Reports that a part of a long operation is done."""
  _LISTENER.get()()


def shown(items: Iterator[T], total: int, label: str) -> Iterator[T]:
  """Yields items and, if this takes long, reports the progress on stderr.

  Args:
    items: items to yield.
    total: number of items.
    label: description of the operation.
  """
  begin = time.monotonic()
  shown_at, terminal, was_shown = begin, sys.stderr.isatty(), False
  start, end, pause_s = ('\r', '', _DRAW_S) if terminal else ('', '\n', _LINE_S)
  for count, item in enumerate(items, 1):
    yield item
    made()
    now = time.monotonic()
    last = count == total and was_shown
    if last or (now - begin > _QUIET_S and now - shown_at > pause_s):
      fraction = count / total
      bar = f'[{"#" * int(_WIDTH * fraction):<{_WIDTH}}] ' if terminal else ''
      text = f'{start}{label}: {bar}{fraction:4.0%}, {now - begin:.0f} s'
      print(
        text, end='\n' if count == total else end, file=sys.stderr, flush=True
      )
      shown_at, was_shown = now, True
