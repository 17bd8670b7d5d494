"""Executes independent tasks in several processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from vit_jax.errors import UserError
from vit_jax.files import paths

_WORKER_BYTES = 2**31  # memory of a worker, including parts and shards
Task = TypeVar('Task')
Result = TypeVar('Result')


def default_workers() -> int:
  """Returns one worker per core, limited by memory."""
  cores, memory = paths.cores(), paths.memory_bytes()
  return cores if memory is None else min(cores, memory // _WORKER_BYTES) or 1


def unordered(
  function: Callable[[Task], Result], tasks: Iterable[Task], workers: int
) -> Iterator[Result]:
  """Yields the results of a function in the order of completion.

  Tasks are taken from the iterable shortly before they are executed, so that
  they need little memory.

  Args:
    function: picklable function; its exceptions are raised again here.
    tasks: arguments of the calls, picklable.
    workers: number of processes; with 1 or 0, tasks run in this process.

  Raises:
    UserError: a process was killed.
  """
  if workers <= 1:
    yield from map(function, tasks)
    return
  pool = futures.ProcessPoolExecutor(
    workers,
    # A forked copy of a process with threads (JAX, TensorFlow) may hang.
    multiprocessing.get_context('spawn'),
    initializer=_start_worker,
  )
  pending: set[futures.Future[Result]] = set()
  try:
    for task in tasks:
      pending.add(pool.submit(function, task))
      if len(pending) > workers:
        done, pending = futures.wait(
          pending, return_when=futures.FIRST_COMPLETED
        )
        yield from (future.result() for future in done)
    for future in futures.as_completed(pending):
      yield future.result()
  except BrokenProcessPool as error:
    raise UserError(
      'a worker process was killed, probably for lack of memory: run the same '
      f'command with fewer --workers than {workers}; it continues.'
    ) from error
  finally:
    pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
  """Makes a worker process end when its parent ends."""
  # Ctrl-C would otherwise print a traceback of each worker.
  signal.signal(signal.SIGINT, signal.SIG_DFL)

  def watch() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
      parent.join()
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()
