"""What the processes of a run do together with a directory.

Each sees it with its own eyes, and an error on one alone must not leave the
others waiting. So they tell each other how it went, and go on together or not
at all. Every call is made by all processes, in the same order.
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
  """The values that the processes gave, by their number; below 2^31."""
  if jax.process_count() == 1:
    return [int(value)]
  return multihost_utils.process_allgather(np.int32(value)).tolist()


def anyone(value: bool) -> bool:
  """Whether it is so on some process."""
  return any(everyone(int(value)))


def from_main(value: int) -> int:
  """The main process's value."""
  return everyone(value)[0]


class FailedError(Exception):
  """Some process could not do what all of them tried."""

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
  """Calls a function on the main process; None on others."""
  is_main = jax.process_index() == 0
  return together(lambda: function(*arguments) if is_main else None)


def together(function: Callable[..., Any], *arguments: Any) -> Any:
  """What a function returns, if it raises on no process.

  Raises:
    FailedError: on all processes, with the worst verdict.
  """
  value, own = None, None
  try:
    value = function(*arguments)
  except jax.errors.JaxRuntimeError:
    raise  # the devices, or a lost peer: no word about the step
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    own = error
  verdicts = everyone(Verdict.WHOLE if own is None else judge(own))
  worst = Verdict(max(verdicts))
  if worst is not Verdict.WHOLE:
    where = [i for i, verdict in enumerate(verdicts) if verdict == worst]
    raise FailedError(worst, own, where)
  return value


def persistently(attempt: Callable[[], Any], what: str, sleep: Sleep) -> Any:
  """Attempts something again after failures that may pass.

  Raises:
    CorruptError: it was damaged twice.
    UserError: it is not for this run, or may not be read.
    StorageError: it cannot be read, however often it is tried.
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
      f'{what} may not be read: {failure}. Nothing was renamed; give this '
      'user the right to read and write it, and start again.'
    )
  raise StorageError(
    f'{what} cannot be read, tried {len(PAUSES_S) + 1} times: {failure}. '
    'Nothing was renamed. Mend the storage and start again; or, to go on from '
    'an older step, rename this one to <step>.bad yourself.'
  )
