"""Ends a process that no longer makes progress, and writes its stacks."""

import contextlib
import faulthandler
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator

from etils import epath

from vit_jax.errors import EXIT_STUCK
from vit_jax.processes import peers

log = logging.getLogger('vit_jax')
_WRITE_S = 30.0  # limit for writing the stacks, s
_KEPT = 100  # recent step times, of which the median is taken


class Watchdog:
  """A thread that expects a sign of life in time.

  Between two steps it allows `factor` times the median of recent steps, but at
  least `min_s`; for everything else, and before the first steps, `pause_s`, or
  the limit given to `pause`. When the time is up it writes the stacks of all
  threads to stderr and to a file and ends the process with exit code 44. The
  watchdogs of all processes that wait for the same peer do so.
  """

  def __init__(
    self, stacks: epath.Path, *, factor: float, min_s: float, pause_s: float
  ):
    self._stacks = stacks
    self._factor, self._min_s, self._pause_s = factor, min_s, pause_s
    self._times: deque[float] = deque(maxlen=_KEPT)
    self._last_step: float | None = None
    self._deadline = time.monotonic() + pause_s
    self._limit_s = pause_s
    self._ended = threading.Event()
    self._thread = threading.Thread(
      target=self._watch, daemon=True, name='watchdog'
    )
    self._thread.start()

  def step(self) -> None:
    """A step has finished."""
    now = time.monotonic()
    if self._last_step is not None:
      self._times.append(now - self._last_step)
    self._last_step = now
    self._allow(self._step_limit())

  @contextlib.contextmanager
  def pause(self, seconds: float | None = None) -> Iterator[None]:
    """Around work that is not a step: evaluation, saving, restoring.

    Args:
      seconds: limit, counted anew after each `alive`.
    """
    self._allow(seconds or self._pause_s)
    yield
    self._last_step = None
    self._allow(self._step_limit())

  def alive(self) -> None:
    """Restarts the current limit."""
    self._allow(self._limit_s)

  def close(self) -> None:
    """Stops watching."""
    self._ended.set()
    self._thread.join()

  def _step_limit(self) -> float:
    if len(self._times) < 3:
      return self._pause_s
    return max(self._factor * statistics.median(self._times), self._min_s)

  def _allow(self, seconds: float) -> None:
    self._limit_s = seconds
    self._deadline = time.monotonic() + seconds

  def _watch(self) -> None:
    while not self._ended.wait(0.2):
      if time.monotonic() > self._deadline:
        self._give_up()

  def _give_up(self) -> None:
    message = (
      f'no sign of life within {self._limit_s:.1f} s: this process or a peer '
      f'that it waits for is stuck. Stacks of all threads are in '
      f'{self._stacks}; exit code {EXIT_STUCK}.'
    )
    print(f'stuck: {message}', file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr)
    writing = threading.Thread(
      target=self._write_stacks, args=(message,), daemon=True
    )
    writing.start()
    writing.join(_WRITE_S)  # the file system may be what is stuck
    peers.say_end(EXIT_STUCK, f'stuck: {message}')
    peers.leave(EXIT_STUCK)

  def _write_stacks(self, message: str) -> None:
    with contextlib.suppress(Exception), tempfile.TemporaryFile('w+') as file:
      print(message, file=file, flush=True)
      faulthandler.dump_traceback(file)
      file.seek(0)
      self._stacks.write_text(file.read())
