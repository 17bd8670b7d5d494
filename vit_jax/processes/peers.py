"""Ends all processes of a run within seconds when one of them ends.

JAX by itself would let the others wait for an exchange that never comes, or 300
seconds at its shutdown barrier. So a process that must end early writes a
message to the key-value store of JAX's coordination service. A thread of each
process polls the store and ends its process with the same exit code.
"""

import contextlib
import faulthandler
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import distributed
from jax._src.lib import _jax

from vit_jax.errors import (
  EXIT_CRASH,
  EXIT_DIVERGED,
  EXIT_PEER_LOST,
  EXIT_PREEMPTED,
  EXIT_STUCK,
  EXIT_USER_ERROR,
  DivergedError,
  PreemptedError,
  StorageError,
  UserError,
)
from vit_jax.processes import interruption

log = logging.getLogger('vit_jax')
HEARTBEAT_S = 30  # time without a heartbeat after which a process is lost
_SAID = 'vit_jax/said/'
_END, _STOP, _HEARD = f'{_SAID}end', f'{_SAID}stop', 'vit_jax/heard/'
_LEAVING = threading.Lock()
_POLL_S = 0.5
_LEAVE_S = 10.0  # time for other processes to read a message, and to clean up


def client() -> Any:
  """Returns JAX's coordination client; None if there is only one process."""
  state = distributed.global_state
  return state.client if state.num_processes > 1 else None


def index() -> int:
  """Returns the index of this process, without initializing devices."""
  return distributed.global_state.process_id


@contextlib.contextmanager
def losses_reported() -> Iterator[None]:
  """Surrounds `jax.distributed.initialize`: a lost peer ends this process (45).

  JAX's own client aborts the process (134) when the coordination service
  reports a loss or no longer answers. JAX has no public way to set a callback
  instead, so the constructor of the client is replaced in the meantime.
  """
  make = _jax.get_distributed_runtime_client

  def make_reporting(*args: Any, **kwargs: Any) -> Any:
    return make(*args, missed_heartbeat_callback=_lost, **kwargs)

  internals: Any = _jax
  internals.get_distributed_runtime_client = make_reporting
  try:
    yield
  finally:
    internals.get_distributed_runtime_client = make


def _lost(status: object) -> None:
  end_on_loss(str(status))


def end_on_loss(reason: str) -> None:
  """Ends this process, and the others that can be reached, with code 45.

  Args:
    reason: error of the coordination service or of an exchange.
  """
  with contextlib.suppress(Exception):
    found = heard()
    if found is not None:  # the peer wrote why it ended
      leave(found['code'], _of_peer(found))
  line = (reason.splitlines() or [''])[0][:300]
  message = (
    f'peer lost: {line}. What was saved is intact; start all processes again, '
    'on as many hosts as are available.'
  )
  say_end(EXIT_PEER_LOST, message)
  leave(EXIT_PEER_LOST, message)


def heard() -> dict[str, Any] | None:
  """Returns the message of a process that ended early, if there is one."""
  try:
    said = json.loads(client().key_value_try_get(_END))
  except Exception:  # noqa: BLE001 (no message, or the service is gone)
    return None
  return None if said['process'] == index() else said


def say_end(code: int, message: str) -> None:
  """Writes a message that this process ends.

  Args:
    code: its exit code.
    message: its reason.
  """
  text = json.dumps({'code': code, 'message': message, 'process': index()})
  # Fails if another process was first, or if the service is gone.
  with contextlib.suppress(Exception):
    client().key_value_set(_END, text)


def say_stop() -> None:
  """Writes a message that all processes must agree on a step and stop there."""
  client().key_value_set(_STOP, str(index()), allow_overwrite=True)


def leave(code: int, message: str | None = None) -> None:
  """Ends this process at once, without JAX's shutdown barrier.

  The process that hosts the coordination service waits until the others have
  read the message.

  Args:
    code: exit code.
    message: message to print.
  """
  if not _LEAVING.acquire(blocking=False):  # another thread is leaving
    threading.Event().wait()
  sys.stdout.flush()
  if message:
    print(message, file=sys.stderr, flush=True)
  with contextlib.suppress(Exception):
    others = distributed.global_state.num_processes - 1
    client().key_value_set(f'{_HEARD}{index()}', '', allow_overwrite=True)
    deadline = time.monotonic() + _LEAVE_S
    while index() == 0 and time.monotonic() < deadline:
      if len(client().key_value_dir_get(_HEARD)) > others:
        break
      time.sleep(0.05)
  os._exit(code)


def is_lost_peer(error: BaseException) -> bool:
  """Returns whether an exchange failed because another process is gone."""
  broken = re.search(
    r'Connection (reset|closed|refused)|Socket closed|Broken pipe'
    r'|heartbeat timeout|UNAVAILABLE',
    str(error),
  )
  return client() is not None and broken is not None


def ending(error: BaseException) -> tuple[int, str] | None:
  """Returns exit code and message of an error; None if it is a crash."""
  for kind, code, word in (
    (UserError, EXIT_USER_ERROR, 'error'),
    (PreemptedError, EXIT_PREEMPTED, 'preempted'),
    (DivergedError, EXIT_DIVERGED, 'diverged'),
    (StorageError, EXIT_CRASH, 'storage failed'),
  ):
    if isinstance(error, kind):
      return code, f'{word}: {error}'
  return None


def announce(error: Exception) -> None:
  """Reports an error that only this process may have to the others.

  It must be called before anything is closed, because closing may wait for the
  others.

  Args:
    error: the error.
  """
  # All processes raise the two others at the same step.
  if client() is None or isinstance(error, (PreemptedError, DivergedError)):
    return
  if ending(error) is None and (heard() or is_lost_peer(error)):
    end_on_loss(str(error))
  code, message = ending(error) or (
    EXIT_CRASH,
    f'crash: {type(error).__name__}: {error} (its own log has the traceback)',
  )
  say_end(code, message)
  leave_soon(code)


def part() -> None:
  """Waits for the other processes; the orderly end of a process."""
  if client() is not None:
    distributed.global_state.shutdown()


def leave_soon(code: int) -> None:
  """Ends this process after some seconds, in case closing waits for a peer."""

  def wait() -> None:
    time.sleep(_LEAVE_S)
    leave(code, 'closing takes too long: exiting')

  threading.Thread(target=wait, daemon=True, name='leave').start()


def leave_interrupted(number: int) -> None:
  """Ends all processes; the reaction to a signal before the first step."""
  message = interruption.early_message(number)
  say_end(EXIT_PREEMPTED, message)
  leave(EXIT_PREEMPTED, message)


def _of_peer(said: dict[str, Any]) -> str:
  """Returns a peer's message with the index of the peer."""
  kind, colon, rest = said['message'].partition(': ')
  return f'{kind}{colon}process {said["process"]}: {rest}'


class _Listener:
  """Thread that polls the messages of other processes.

  The only instance is `_LISTENER`.

  Attributes:
    on_stop: function that is called once, when a process asks all to stop.
  """

  def __init__(self):
    self.on_stop: Callable[[], None] | None = None
    self._stopped = False

  def start(self) -> None:
    """Starts the thread."""
    threading.Thread(target=self._listen, daemon=True, name='peers').start()

  def _listen(self) -> None:
    failures = 0
    # Many processes ask less often, so that the service answers all of them.
    interval = max(_POLL_S, distributed.global_state.num_processes / 100)
    while (service := client()) is not None:
      try:
        said = dict(service.key_value_dir_get(_SAID))
        failures = 0
      except Exception as error:  # noqa: BLE001 (whatever the client raises)
        said, failures = {}, failures + 1
        if client() is not None and failures * interval > HEARTBEAT_S:
          end_on_loss(str(error))
      self._obey(said)
      time.sleep(interval)

  def _obey(self, said: dict[str, str]) -> None:
    if _END in said:
      found = json.loads(said[_END])
      if found['process'] != index():  # otherwise it is leaving by itself
        if found['code'] == EXIT_STUCK:
          faulthandler.dump_traceback(sys.stderr)
        leave(found['code'], _of_peer(found))
    if _STOP in said and self.on_stop is not None and not self._stopped:
      self._stopped = True
      try:
        self.on_stop()
      except Exception as error:  # noqa: BLE001 (a peer has ended in between)
        log.warning('no agreement on a step to stop at: %s', error)


_LISTENER = _Listener()


def listen() -> None:
  """Starts polling the messages of other processes, if there are others."""
  if client() is not None:
    _LISTENER.start()


def on_stop(agree: Callable[[], None]) -> None:
  """Sets the function to call, once, after `say_stop` of any process.

  Args:
    agree: the function.
  """
  _LISTENER.on_stop = agree
