"""The processes of a run: the end of one is the end of all, within seconds.

Left alone, JAX lets the others wait: for an exchange that never comes, or 300
seconds at its shutdown barrier. So a process that must end early says so in the
key-value store of JAX's coordination service, and a thread of each process
looks there and ends it with the same exit code.
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
HEARTBEAT_S = 30  # without a sign of life for so long, a process is lost
_SAID = 'vit_jax/said/'
_END, _STOP, _HEARD = f'{_SAID}end', f'{_SAID}stop', 'vit_jax/heard/'
_LEAVING = threading.Lock()
_POLL_S = 0.5
_LEAVE_S = 10.0  # for the others to hear of an end, and for cleaning up


def client() -> Any:
  """JAX's coordination client; None where this process is alone."""
  state = distributed.global_state
  return state.client if state.num_processes > 1 else None


def index() -> int:
  """The number of this process; unlike JAX's, it needs no devices."""
  return distributed.global_state.process_id


@contextlib.contextmanager
def losses_reported() -> Iterator[None]:
  """Around `jax.distributed.initialize`: a lost peer ends this process with 45.

  JAX's own client aborts the process (134) when the coordination service tells
  it so, or no longer answers; there is no public way to be told instead.
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
  """Ends this process, and the others that still hear it, with 45."""
  with contextlib.suppress(Exception):
    found = heard()
    if found is not None:  # the peer said why it ended
      leave(found['code'], _of_peer(found))
  line = (reason.splitlines() or [''])[0][:300]
  message = (
    f'peer lost: {line}. What was saved is whole; start all processes again, '
    'on as many hosts as there are.'
  )
  say_end(EXIT_PEER_LOST, message)
  leave(EXIT_PEER_LOST, message)


def heard() -> dict[str, Any] | None:
  """What another process that ended early has said, if one has."""
  try:
    said = json.loads(client().key_value_try_get(_END))
  except Exception:  # noqa: BLE001 (none, or the service is gone)
    return None
  return None if said['process'] == index() else said


def say_end(code: int, message: str) -> None:
  """Tells the other processes that this one ends, and why."""
  text = json.dumps({'code': code, 'message': message, 'process': index()})
  with contextlib.suppress(Exception):  # another was first; or all is over
    client().key_value_set(_END, text)


def say_stop() -> None:
  """Asks all processes to agree on a step and stop there."""
  client().key_value_set(_STOP, str(index()), allow_overwrite=True)


def leave(code: int, message: str | None = None) -> None:
  """Ends this process at once, without JAX's shutdown barrier.

  The process that hosts the coordination service stays until all have heard.
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
  """Whether an exchange between processes failed because one is gone."""
  broken = re.search(
    r'Connection (reset|closed|refused)|Socket closed|Broken pipe'
    r'|heartbeat timeout|UNAVAILABLE',
    str(error),
  )
  return client() is not None and broken is not None


def ending(error: BaseException) -> tuple[int, str] | None:
  """The exit code and the message of an error; None if it is a crash."""
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
  """Tells the others of an error that only this process may have.

  Must come before anything is closed: that may wait for the others.
  """
  if client() is None or isinstance(error, (PreemptedError, DivergedError)):
    return  # these come to all processes at one step
  if ending(error) is None and (heard() or is_lost_peer(error)):
    end_on_loss(str(error))
  code, message = ending(error) or (
    EXIT_CRASH,
    f'crash: {type(error).__name__}: {error} (its own log has the traceback)',
  )
  say_end(code, message)
  leave_soon(code)


def part() -> None:
  """The orderly end of a process that has done all: meets the others."""
  if client() is not None:
    distributed.global_state.shutdown()


def leave_soon(code: int) -> None:
  """Ends this process after a while, in case cleaning up waits for a peer."""

  def wait() -> None:
    time.sleep(_LEAVE_S)
    leave(code, 'cleaning up takes too long: exiting')

  threading.Thread(target=wait, daemon=True, name='leave').start()


def leave_interrupted(number: int) -> None:
  """The reaction of several processes to a signal before the first step."""
  message = interruption.early_message(number)
  say_end(EXIT_PREEMPTED, message)
  leave(EXIT_PREEMPTED, message)


def _of_peer(said: dict[str, Any]) -> str:
  kind, colon, rest = said['message'].partition(': ')
  return f'{kind}{colon}process {said["process"]}: {rest}'


class _Listener:
  """The thread of this process that listens to the others; one, `_LISTENER`."""

  def __init__(self):
    self.on_stop: Callable[[], None] | None = None
    self._stopped = False

  def start(self) -> None:
    threading.Thread(target=self._listen, daemon=True, name='peers').start()

  def _listen(self) -> None:
    failures = 0
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
      if found['process'] != index():  # else it is leaving by itself
        if found['code'] == EXIT_STUCK:
          faulthandler.dump_traceback(sys.stderr)
        leave(found['code'], _of_peer(found))
    if _STOP in said and self.on_stop is not None and not self._stopped:
      self._stopped = True
      try:
        self.on_stop()
      except Exception as error:  # noqa: BLE001 (a peer has left in between)
        log.warning('no agreement on a step to stop at: %s', error)


_LISTENER = _Listener()


def listen() -> None:
  """Starts to listen to the other processes, where there are others."""
  if client() is not None:
    _LISTENER.start()


def on_stop(agree: Callable[[], None]) -> None:
  """What to do, once, after `say_stop` of any process."""
  _LISTENER.on_stop = agree
