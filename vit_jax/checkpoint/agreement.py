"""Agreement between the processes of a run about a directory.

Each process reads the directory by itself. An error on only one of them must
not leave the others waiting, so the processes exchange how it went, and either
all of them go on or none. All processes make every call, in the same order.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.checkpoint import items
from vit_jax.checkpoint.failures import PAUSES_S, Verdict, judge
from vit_jax.checkpoint.items import CorruptError
from vit_jax.errors import StorageError, UserError

log = logging.getLogger('vit_jax')
Sleep = Callable[[float], None]


def everyone(value: int) -> list[int]:
  """Gathers an integer below 2^31 from each process, by process index."""
  if jax.process_count() == 1:
    return [int(value)]
  return multihost_utils.process_allgather(np.int32(value)).tolist()


def anyone(value: bool) -> bool:
  """Returns whether the value is true on any process."""
  return any(everyone(int(value)))


def from_main(value: int) -> int:
  """Returns the value of the main process."""
  return everyone(value)[0]


class FailedError(Exception):
  """At least one process could not do what all of them tried.

  Attributes:
    verdict: the worst verdict of all processes.
    own: the error of this process; None if it succeeded.
  """

  def __init__(self, verdict: Verdict, own: Exception | None, where: list[int]):
    if own is None:
      text = f'process {", ".join(map(str, where))} failed; its log says why'
    elif isinstance(own, CorruptError | UserError):
      text = str(own)
    else:
      text = items.root_cause(own)
    super().__init__(text.rstrip('.'))
    self.verdict, self.own = verdict, own


def on_main(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function on the main process only.

  Args:
    function: function to call.
    *arguments: its arguments.

  Returns:
    What the function returns; None on other processes.

  Raises:
    FailedError: on all processes, if the function raises.
  """
  is_main = jax.process_index() == 0
  return together(lambda: function(*arguments) if is_main else None)


def together(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function on every process; either all succeed or all raise.

  Args:
    function: function to call.
    *arguments: its arguments.

  Returns:
    What the function returns on this process.

  Raises:
    FailedError: on all processes, if the function raises on any of them.
  """
  value, own = None, None
  try:
    value = function(*arguments)
  except jax.errors.JaxRuntimeError:
    raise  # from the devices or a lost peer: says nothing about the step
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    own = error
  verdicts = everyone(Verdict.WHOLE if own is None else judge(own))
  worst = Verdict(max(verdicts))
  if worst is not Verdict.WHOLE:
    where = [i for i, verdict in enumerate(verdicts) if verdict == worst]
    raise FailedError(worst, own, where)
  return value


def with_retries(attempt: Callable[[], Any], what: str, sleep: Sleep) -> Any:
  """Tries to read something, again after failures that may pass.

  Args:
    attempt: function that reads; raises FailedError on all processes.
    what: name of what is read, for messages.
    sleep: function that waits for some seconds.

  Returns:
    What the attempt returns.

  Raises:
    CorruptError: it was damaged in two attempts. (Some file systems return
      damaged data once, while a cache is stale.)
    UserError: it does not belong to this run, or may not be read.
    StorageError: it cannot be read, however often this is tried.
  """
  damaged = 0
  for pause_s in (*PAUSES_S, None):
    try:
      return attempt()
    except FailedError as error:
      failure = error
    if failure.verdict is Verdict.REFUSED:
      if isinstance(failure.own, UserError):
        raise failure.own
      raise UserError(f'{what} cannot be used: {failure}.')
    damaged += failure.verdict is Verdict.DAMAGED
    if damaged == 2:
      raise CorruptError(str(failure)) from failure
    if pause_s is not None:
      log.warning('%s: %s. Trying again in %g s.', what, failure, pause_s)
      sleep(pause_s)
  if failure.verdict is Verdict.DENIED:
    raise UserError(
      f'{what} may not be read: {failure}. Nothing was renamed. Give this '
      'user permission to read and write it, and start again.'
    )
  raise StorageError(
    f'{what} cannot be read, tried {len(PAUSES_S) + 1} times: {failure}. '
    'Nothing was renamed. Start again when the storage answers; or, to go on '
    'from an older step, rename this one to <step>.bad yourself.'
  )
