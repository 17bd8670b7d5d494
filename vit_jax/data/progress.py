"""How far long work is: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar('T')
_QUIET_S = 1.0  # nothing is said of what takes no longer
_LINE_S = 10.0  # between two lines of a log
_DRAW_S = 0.2  # between two drawings of a bar
_WIDTH = 24  # characters of a bar


def shown(items: Iterator[T], total: int, label: str) -> Iterator[T]:
  """Passes items on; says on stderr how many came, if it takes long.

  Args:
    items: the items.
    total: number of items.
    label: description of the work.
  """
  begin = time.monotonic()
  said, terminal, spoke = begin, sys.stderr.isatty(), False
  start, end, pause_s = ('\r', '', _DRAW_S) if terminal else ('', '\n', _LINE_S)
  for count, item in enumerate(items, 1):
    yield item
    now = time.monotonic()
    last = count == total and spoke
    if last or (now - begin > _QUIET_S and now - said > pause_s):
      share = count / total
      bar = f'[{"#" * int(_WIDTH * share):<{_WIDTH}}] ' if terminal else ''
      text = f'{start}{label}: {bar}{share:4.0%}, {now - begin:.0f} s'
      print(
        text, end='\n' if count == total else end, file=sys.stderr, flush=True
      )
      said, spoke = now, True
