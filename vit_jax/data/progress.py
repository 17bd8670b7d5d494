"""Reports the progress of long operations on stderr, every ten seconds."""

import contextlib
import contextvars
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar('T')
_LINE_S = 10.0  # interval between two lines
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
  begin = shown_at = time.monotonic()
  was_shown = False
  for count, item in enumerate(items, 1):
    yield item
    made()
    now = time.monotonic()
    if now - shown_at > _LINE_S or (was_shown and count == total):
      text = f'{label}: {count / total:4.0%}, {now - begin:.0f} s'
      print(text, file=sys.stderr, flush=True)
      shown_at, was_shown = now, True
