"""Makes all processes of a run succeed or fail together when they read files.

Each process reads its files by itself. If only one of them failed, the others
would wait for it in the next collective. So the processes exchange whether they
succeeded, and if one of them failed, all raise an error. All processes must
make the same calls, in the same order.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax

from vit_jax.checkpoint import items
from vit_jax.checkpoint.failures import Outcome, classify
from vit_jax.checkpoint.items import CorruptError
from vit_jax.errors import StorageError, UserError
from vit_jax.files.outages import PAUSES_S
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
Sleep = Callable[[float], None]


class FailedError(Exception):
  """A call failed on at least one process.

  Attributes:
    outcome: the worst outcome of all processes.
    local_error: error of this process; None if it succeeded.
  """

  def __init__(
    self,
    outcome: Outcome,
    local_error: Exception | None,
    processes: list[int],
  ):
    """Describes the failure.

    Args:
      outcome: the worst outcome of all processes.
      local_error: error of this process; None if it succeeded.
      processes: indices of the processes with the worst outcome.
    """
    if local_error is None:
      failed = ', '.join(map(str, processes))
      text = f'process {failed} failed; the cause is in its log'
    elif isinstance(local_error, CorruptError | UserError):
      text = str(local_error)
    else:
      text = items.root_cause(local_error)
    super().__init__(text.rstrip('.'))
    self.outcome, self.local_error = outcome, local_error


def on_main(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function on the main process only.

  Args:
    function: function to call.
    *arguments: arguments of the function.

  Returns:
    The result of the function; None on other processes.

  Raises:
    FailedError: on all processes, if the function raises.
  """
  is_main = jax.process_index() == 0
  return on_all(lambda: function(*arguments) if is_main else None)


def on_all(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function on every process; either all succeed or all raise.

  Args:
    function: function to call.
    *arguments: arguments of the function.

  Returns:
    The result of the function on this process.

  Raises:
    FailedError: on all processes, if the function raises on any of them.
  """
  value, local_error = None, None
  try:
    value = function(*arguments)
  except jax.errors.JaxRuntimeError:
    raise  # an error of the devices or a lost peer, not of the files
  except Exception as error:  # noqa: BLE001 (damaged files raise any type)
    local_error = error
  local = Outcome.INTACT if local_error is None else classify(local_error)
  outcomes = consensus.gather_integer(local)
  worst = Outcome(max(outcomes))
  if worst is not Outcome.INTACT:
    processes = [i for i, outcome in enumerate(outcomes) if outcome == worst]
    raise FailedError(worst, local_error, processes)
  return value


def with_retries(attempt: Callable[[], Any], subject: str, sleep: Sleep) -> Any:
  """Calls a function that reads files, again if a failure may be temporary.

  Args:
    attempt: function to call; if it fails, it must raise FailedError on all
      processes.
    subject: name of the files, for messages.
    sleep: function that waits for some seconds.

  Returns:
    The result of the function.

  Raises:
    CorruptError: the files were damaged in two attempts. (Some file systems
      return damaged data once, while a cache is stale.)
    UserError: the files do not belong to this run, or there is no permission to
      read them.
    StorageError: the files cannot be read, even after retries.
  """
  damaged = 0
  for pause_s in (*PAUSES_S, None):
    try:
      return attempt()
    except FailedError as error:
      failure = error
    if failure.outcome is Outcome.REFUSED:
      if isinstance(failure.local_error, UserError):
        raise failure.local_error
      raise UserError(f'{subject} cannot be used: {failure}.')
    damaged += failure.outcome is Outcome.DAMAGED
    if damaged == 2:
      raise CorruptError(str(failure)) from failure
    if pause_s is not None:
      log.warning('%s: %s. Trying again in %g s.', subject, failure, pause_s)
      sleep(pause_s)
  if failure.outcome is Outcome.DENIED:
    raise UserError(
      f'there is no permission to read {subject}: {failure}. Nothing was '
      'renamed. Give this user permission to read and write it, and start '
      'again.'
    )
  raise StorageError(
    f'{subject} cannot be read, tried {len(PAUSES_S) + 1} times: {failure}. '
    'Nothing was renamed. Start again when the storage responds; or, to resume '
    'from an older step, rename this one to <step>.bad yourself.'
  )
