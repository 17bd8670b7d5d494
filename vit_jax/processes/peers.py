"""Ends all processes of a run within seconds when one of them ends.

With JAX alone, the others would wait for a collective that never finishes, or
for 300 seconds at the shutdown barrier. So a process that must end early writes
a message to the key-value store of JAX's coordination service. A thread of each
process polls the store, and ends its process with the same exit code.
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from vit_jax import errors
from vit_jax.processes import consensus, console, interruption
from vit_jax.processes.consensus import client, index

log = logging.getLogger('vit_jax')
HEARTBEAT_S = 30  # time without a heartbeat after which a process is lost
# Keys of the store: messages to all processes, and their confirmations.
_MESSAGES = 'vit_jax/message/'
_END, _STOP, _READ = f'{_MESSAGES}end', f'{_MESSAGES}stop', 'vit_jax/read/'
_EXITING = threading.Lock()  # held by the thread that ends the process
_ENDING: list[int] = []  # exit code of a process that is ending already
_POLL_S = 0.5
_ANSWER_S = 5.0  # time for the coordination service to answer
_EXIT_S = 10.0  # time for other processes to read a message and clean up


def handle_lost_peers() -> contextlib.AbstractContextManager[None]:
  """Makes the loss of a peer end this process with exit code 45.

  `jax.distributed.initialize` must be called in the body.
  """
  ctypes.CDLL(None).signal(signal.SIGABRT, _ABORT_HANDLER)
  return consensus.calling_on_loss(end_on_loss)


def _on_abort(number: int) -> None:
  """Handles an abort of this process by C++ code.

  If a peer no longer responds, JAX (0.10 to 0.12) calls `end_on_loss` with a
  value that it cannot convert to Python, and aborts while it holds a lock of
  its client. Then calls of the client do not return. Other aborts end the
  process as without this handler.

  Args:
    number: signal, SIGABRT.
  """
  # While a process that ends waits for the others, JAX may regard one as lost.
  if _ENDING:
    os._exit(_ENDING[0])
  answered = threading.Event()

  def ask() -> None:
    message_of_peer()  # does not return while the lock is held
    answered.set()

  threading.Thread(target=ask, daemon=True).start()
  if answered.wait(_ANSWER_S):
    faulthandler.dump_traceback(sys.stderr)
    ctypes.CDLL(None).signal(number, ctypes.c_void_p(int(signal.SIG_DFL)))
    os.kill(os.getpid(), number)
    return  # a pending signal may be delivered only after the handler
  message = _loss('a process stopped, or no longer responds')
  console.print_error(message)
  os._exit(errors.EXIT_PEER_LOST)


_ABORT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_abort)


def end_on_loss(reason: object) -> None:
  """Ends this process, and all others that can be reached, with code 45.

  Args:
    reason: status or error of the coordination service or of a collective.
  """
  with contextlib.suppress(Exception):
    found = message_of_peer()
    if found is not None:  # the peer published its exit code and reason
      exit_now(found['code'], _of_peer(found))
  first_line, _, _ = str(reason).partition('\n')
  message = _loss(first_line[:300])
  publish_end(errors.EXIT_PEER_LOST, message)
  exit_now(errors.EXIT_PEER_LOST, message)


def _loss(reason: str) -> str:
  """Returns the message about a lost peer."""
  return (
    f'peer lost: {reason}. The saved checkpoints are intact; start all '
    'processes again, on as many hosts as are available.'
  )


def message_of_peer() -> dict[str, Any] | None:
  """Returns the message of another process that ended early, or None."""
  try:
    message = json.loads(client().key_value_try_get(_END))
  except Exception:  # noqa: BLE001 (no message, or the service is gone)
    return None
  return None if message['process'] == index() else message


def publish_end(code: int, message: str) -> None:
  """Makes all other processes end, because this one ends.

  Args:
    code: exit code.
    message: reason, for the other processes to print.
  """
  text = json.dumps({'code': code, 'message': message, 'process': index()})
  # Setting the key fails if another process was first, or if the service ended.
  with contextlib.suppress(Exception):
    client().key_value_set(_END, text)


def publish_stop() -> None:
  """Makes all processes agree on a step and stop there."""
  client().key_value_set(_STOP, str(index()), allow_overwrite=True)


def exit_now(code: int, message: str | None = None) -> None:
  """Ends this process at once, without JAX's shutdown barrier.

  Process 0, which hosts the coordination service, waits until the others have
  read the message of `publish_end`.

  Args:
    code: exit code.
    message: message to print.
  """
  if not _EXITING.acquire(blocking=False):
    threading.Event().wait()  # until another thread has ended the process
  _ENDING.append(code)
  if message:
    console.print_error(message)
  with contextlib.suppress(Exception):
    client().key_value_set(f'{_READ}{index()}', '', allow_overwrite=True)
    deadline = time.monotonic() + _EXIT_S
    while index() == 0 and time.monotonic() < deadline:
      confirmations = client().key_value_dir_get(_READ)
      if len(confirmations) == consensus.num_processes():
        break
      time.sleep(0.05)
  os._exit(code)


def is_lost_peer(error: BaseException) -> bool:
  """Returns whether an error means that another process was lost."""
  # Messages of Gloo, gRPC and JAX's coordination service.
  broken = re.search(
    r'Connection (reset|closed|refused)|Socket closed|Broken pipe'
    r'|heartbeat timeout|UNAVAILABLE',
    str(error),
  )
  is_lost = isinstance(error, ConnectionError) or broken is not None
  return client() is not None and is_lost


def exit_status(error: BaseException) -> tuple[int, str] | None:
  """Returns exit code and message of an error; None if it is a crash."""
  for kind, code, word in (
    (errors.UserError, errors.EXIT_USER_ERROR, 'error'),
    (errors.PreemptedError, errors.EXIT_PREEMPTED, 'preempted'),
    (errors.DivergedError, errors.EXIT_DIVERGED, 'diverged'),
    (errors.DownloadError, errors.EXIT_CRASH, 'download failed'),
    (errors.StorageError, errors.EXIT_CRASH, 'storage failed'),
  ):
    if isinstance(error, kind):
      return code, f'{word}: {error}'
  return None


def announce(error: Exception) -> None:
  """Publishes an error that may have occurred on this process only.

  This function must be called before anything is closed, because closing may
  wait for the other processes.

  Args:
    error: error that ends this process.
  """
  # All processes raise these two errors at the same step.
  if client() is None or isinstance(
    error, (errors.PreemptedError, errors.DivergedError)
  ):
    return
  status = exit_status(error)
  if status is not None:
    code, message = status
    publish_end(code, message)
    exit_soon(code, message)
    return
  # An unexpected error may be the consequence of the end of another process.
  if message_of_peer() or is_lost_peer(error):
    end_on_loss(str(error))
  text = f'{type(error).__name__}: {error} (the traceback is in its log)'
  publish_end(errors.EXIT_CRASH, f'crash: {text}')
  traceback_text = ''.join(traceback.format_exception(error))
  exit_soon(errors.EXIT_CRASH, traceback_text)


def exit_soon(code: int, message: str) -> None:
  """Ends this process if closing takes longer than ten seconds.

  Args:
    code: exit code.
    message: cause, which otherwise would be printed after closing.
  """

  def wait() -> None:
    time.sleep(_EXIT_S)
    exit_now(code, f'closing takes too long: exiting\n{message}')

  threading.Thread(target=wait, daemon=True, name='late exit').start()


def exit_interrupted(number: int) -> None:
  """Ends this process, and by a message all others, with exit code 42.

  This is the reaction to a signal before a run handles signals itself.

  Args:
    number: number of the signal.
  """
  message = interruption.early_exit_message(number)
  publish_end(errors.EXIT_PREEMPTED, message)
  exit_now(errors.EXIT_PREEMPTED, message)


def _of_peer(message: dict[str, Any]) -> str:
  """Returns the text of a peer's message, with the index of the peer.

  'error: no data' becomes 'error: process 1: no data'.
  """
  kind, colon, text = message['message'].partition(': ')
  return f'{kind}{colon}process {message["process"]}: {text}'


class Listener:
  """Thread that polls the messages of other processes.

  The only instance is `LISTENER`.

  Attributes:
    on_stop: function that is called once, after `publish_stop` of any process.
  """

  def __init__(self):
    self.on_stop: Callable[[], None] | None = None
    self._stopped = False

  def start(self) -> None:
    """Starts the thread, if there are other processes."""
    if client() is not None:
      threading.Thread(target=self._listen, daemon=True, name='peers').start()

  def _listen(self) -> None:
    """Polls the store until JAX has shut down; runs in a thread."""
    failures = 0
    # The more processes, the less often each one polls, so that the service is
    # not overloaded.
    interval = max(_POLL_S, consensus.num_processes() / 100)
    while (service := client()) is not None:
      try:
        messages = dict(service.key_value_dir_get(_MESSAGES))
        failures = 0
      except Exception as error:  # noqa: BLE001 (whatever the client raises)
        messages, failures = {}, failures + 1
        if client() is not None and failures * interval > HEARTBEAT_S:
          end_on_loss(str(error))
      self._handle(messages)
      time.sleep(interval)

  def _handle(self, messages: dict[str, str]) -> None:
    """Ends this process, or agrees on a step to stop, after a message."""
    if _END in messages:
      found = json.loads(messages[_END])
      # After this process's own message, another thread ends it already.
      if found['process'] != index():
        if found['code'] == errors.EXIT_STUCK:
          faulthandler.dump_traceback(sys.stderr)
        exit_now(found['code'], _of_peer(found))
    if _STOP in messages and self.on_stop is not None and not self._stopped:
      self._stopped = True
      try:
        self.on_stop()
      except Exception as error:  # noqa: BLE001 (a peer has ended meanwhile)
        log.warning(
          'the processes could not agree on a step to stop: %s', error
        )


LISTENER = Listener()
