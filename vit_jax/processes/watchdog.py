"""Ends a process that makes no progress, and writes its stack traces."""

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
from vit_jax.processes import console, peers

log = logging.getLogger('vit_jax')
_POLL_S = 0.2
_STOPPED_S = 3.0  # time without a poll after which the process was stopped
_WRITE_S = 30.0  # time limit for writing the stack traces
_RECENT_STEPS = 100  # number of step times whose median is used


class Watchdog:
  """A thread that ends the process if it makes no progress for too long.

  The time limit of a step is `factor` times the median of recent steps, but at
  least `min_s`. For all other work, and for the first steps, it is `pause_s` or
  the limit given to `pause`. After that time, the watchdog writes the stack
  traces of all threads to stderr and to a file, and ends the process with exit
  code 44. If several processes wait for a stuck peer, each of them ends in this
  way.
  """

  def __init__(
    self, stacks: epath.Path, *, factor: float, min_s: float, pause_s: float
  ):
    """Starts the thread.

    Args:
      stacks: file for stack traces.
      factor: longest time of a step, in medians of recent steps.
      min_s: seconds that any step may take, however short the median.
      pause_s: seconds that any other work may take.
    """
    self._stacks = stacks
    self._factor, self._min_s, self._pause_s = factor, min_s, pause_s
    self._times: deque[float] = deque(maxlen=_RECENT_STEPS)
    self._last_step: float | None = None
    self._deadline = time.monotonic() + pause_s
    self._limit_s, self._activity = pause_s, ''
    self._ended = threading.Event()
    self._thread = threading.Thread(
      target=self._watch, daemon=True, name='watchdog'
    )
    self._thread.start()

  def step(self) -> None:
    """Reports that a step has finished."""
    now = time.monotonic()
    if self._last_step is not None:
      self._times.append(now - self._last_step)
    self._last_step = now
    self._allow(self._step_limit())

  @contextlib.contextmanager
  def pause(
    self, seconds: float | None = None, activity: str = ''
  ) -> Iterator[None]:
    """Sets another time limit for work that is not a step, such as evaluating.

    Pauses must not be nested. After an error, the limit stays, because the run
    ends.

    Args:
      seconds: time limit, which each call of `alive` restarts; by default
        `pause_s`.
      activity: description of the work, and of usual causes of a hang, for the
        message.
    """
    self._activity = activity
    self._allow(seconds or self._pause_s)
    yield
    self._last_step, self._activity = None, ''
    self._allow(self._step_limit())

  def alive(self) -> None:
    """Reports progress, which restarts the current time limit."""
    self._allow(self._limit_s)

  def close(self) -> None:
    """Stops the thread."""
    self._ended.set()
    self._thread.join()

  def _step_limit(self) -> float:
    """Returns the time limit of the next step."""
    if len(self._times) < 3:  # too few for a median
      return self._pause_s
    return max(self._factor * statistics.median(self._times), self._min_s)

  def _allow(self, seconds: float) -> None:
    """Sets the time limit, which starts now."""
    self._limit_s = seconds
    self._deadline = time.monotonic() + seconds

  def _watch(self) -> None:
    """Waits for the deadline, which other threads move; runs in a thread."""
    last = time.monotonic()
    while not self._ended.wait(_POLL_S):
      now = time.monotonic()
      # If this thread did not run, the process was stopped (Ctrl-Z).
      if now - last > _STOPPED_S:
        self._deadline += now - last
      last = now
      if now > self._deadline:
        self._end_process()

  def _end_process(self) -> None:
    """Writes the stack traces, and ends all processes with exit code 44."""
    activity = f' while {self._activity}' if self._activity else ''
    message = (
      f'no progress within {self._limit_s:.1f} s{activity}: this process, or a '
      'peer that it waits for, is stuck. Stack traces of all threads are in '
      f'{self._stacks}; exit code {EXIT_STUCK}.'
    )
    console.print_error(f'stuck: {message}')
    faulthandler.dump_traceback(sys.stderr)
    writing = threading.Thread(
      target=self._write_stacks, args=(message,), daemon=True
    )
    # If there is no memory for a thread, the stack traces are only on stderr.
    with contextlib.suppress(RuntimeError):
      writing.start()
      writing.join(_WRITE_S)  # the file system itself may be stuck
    peers.publish_end(EXIT_STUCK, f'stuck: {message}')
    peers.exit_now(EXIT_STUCK)

  def _write_stacks(self, message: str) -> None:
    # A local file comes first, because `faulthandler` needs a file descriptor.
    with contextlib.suppress(Exception), tempfile.TemporaryFile('w+') as file:
      print(message, file=file, flush=True)
      faulthandler.dump_traceback(file)
      file.seek(0)
      self._stacks.write_text(file.read())
