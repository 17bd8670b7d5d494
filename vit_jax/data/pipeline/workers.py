"""Workers that load examples: threads of this process, or child processes."""

import dataclasses
import logging
import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import numpy as np

from vit_jax.data import contract
from vit_jax.data.pipeline.loader import BadRecord, HostBatch, Loader, Share
from vit_jax.errors import UserError

log = logging.getLogger('vit_jax')

_MAX_RESTARTS = 3  # while the same examples are loaded


class Workers(Protocol):
  """Fills buffers in the background."""

  def buffers(self, rows: int) -> Any:
    """Returns a buffer into which a share can be loaded."""
    ...

  def fill(self, batch: Any, share: Share, first: int) -> Any:
    """Starts loading a share into the rows from `first` on.

    Returns:
      A task, the argument of `result`.
    """
    ...

  def result(self, task: Any) -> list[BadRecord]:
    """Waits for a task and returns the bad records that it met.

    Raises:
      UserError: the loader raised it, or worker processes are killed again
        and again.
    """
    ...

  def collect(self, batch: Any) -> HostBatch:
    """Returns the filled arrays once every future is done."""
    ...

  def close(self) -> None:
    """Stops the workers; work that has not begun is dropped."""
    ...


class Threads:
  """Threads: decoding and resizing release Python's lock."""

  def __init__(self, loader: Loader, number: int):
    self._loader = loader
    self._pool = ThreadPoolExecutor(number, 'reader')

  def buffers(self, rows: int) -> HostBatch:
    return self._loader.buffers(rows)

  def fill(self, batch: HostBatch, share: Share, first: int) -> Future:
    return self._pool.submit(self._loader.fill, batch, share, first)

  def result(self, task: Future) -> list[BadRecord]:
    return task.result()

  def collect(self, batch: HostBatch) -> HostBatch:
    return batch

  def close(self) -> None:
    self._pool.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass
class _Task:
  """A share that worker processes load.

  Attributes:
    arguments: arguments of `_fill`.
    pool: the pool to which the share was submitted.
    future: its result.
  """

  arguments: tuple[int, Share, int]
  pool: ProcessPoolExecutor
  future: Future


class Processes:
  """Processes that write into shared memory, reused from batch to batch.

  They are spawned, because a forked copy of a process that runs JAX may hang;
  the loader is sent to each of them once. The memory has no name that could
  outlive its users, and the workers end with this process, even if it is
  killed. If a worker is killed, all are started again, and the shares that are
  not finished are loaded again: a share always gives the same rows.
  """

  def __init__(self, loader: Loader, number: int, rows: int, batches: int):
    self._loader, self._number = loader, number
    self._layout = loader.layout(rows)
    size = contract.num_bytes(self._layout)
    self._context = multiprocessing.get_context('spawn')
    # Unlinked as soon as it is made; workers inherit it when they start.
    self._memory = [self._context.RawArray('B', size) for _ in range(batches)]
    self._free = list(range(batches))
    self._pool = self._started()

  def _started(self) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
      self._number,
      self._context,
      initializer=_start_worker,
      initargs=(self._loader, self._memory, self._layout),
    )

  def buffers(self, rows: int) -> int:
    del rows
    slot = self._free.pop()
    for array in _views(self._memory[slot], self._layout).values():
      array[...] = 0
    return slot

  def fill(self, batch: int, share: Share, first: int) -> _Task:
    arguments = (batch, share, first)
    return _Task(arguments, self._pool, self._submit(arguments))

  def _submit(self, arguments: tuple[int, Share, int]) -> Future:
    try:
      return self._pool.submit(_fill, *arguments)
    except BrokenProcessPool as error:
      failed = Future()
      failed.set_exception(error)
      return failed

  def result(self, task: _Task) -> list[BadRecord]:
    restarts = 0
    while True:
      try:
        return task.future.result()
      except BrokenProcessPool as error:
        if restarts == _MAX_RESTARTS:
          raise UserError(
            f'reader processes were killed {restarts + 1} times while the same '
            'examples were loaded, usually for lack of memory (see dmesg): '
            'lower reader.processes or reader.prefetch, or use threads with '
            '--config.reader.processes=0.'
          ) from error
      restarts += 1
      self._load_again(task)

  def _load_again(self, task: _Task) -> None:
    """Submits a task again, to new workers if this has not happened yet."""
    if task.pool is self._pool:
      log.warning(
        'a reader process was killed, usually for lack of memory (see dmesg); '
        'all reader processes are started again.'
      )
      self._pool.shutdown(wait=True)  # no old worker writes from here on
      self._pool = self._started()
    task.pool, task.future = self._pool, self._submit(task.arguments)

  def collect(self, batch: int) -> HostBatch:
    # A copy: a CPU device would go on reading the memory that is reused.
    views = _views(self._memory[batch], self._layout)
    arrays = {key: array.copy() for key, array in views.items()}
    self._free.append(batch)
    return arrays

  def close(self) -> None:
    self._pool.shutdown(wait=True, cancel_futures=True)


def _views(memory: Any, layout: Any) -> HostBatch:
  """Returns the arrays of a layout, which are contiguous in shared memory."""
  views, offset = {}, 0
  for key, (shape, dtype) in layout.items():
    views[key] = np.ndarray(shape, dtype, memory, offset)
    offset += views[key].nbytes
  return views


# What a worker process was started with: (loader, memories, layout). It is
# written once, by the pool's initializer, before any task.
_worker: list[Any] = []


def _start_worker(loader: Loader, memories: list[Any], layout: Any) -> None:
  import cv2

  threading.Thread(target=_end_with_parent, daemon=True).start()
  cv2.setNumThreads(1)
  _worker.extend([loader, memories, layout])


def _end_with_parent() -> None:
  """Ends this process when its parent has, however that happened.

  The pool's workers wait for tasks in a pipe that their siblings hold open, so
  a killed parent would leave them for ever.
  """
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _fill(slot: int, share: Share, first: int) -> list[BadRecord]:
  loader, memories, layout = _worker
  return loader.fill(_views(memories[slot], layout), share, first)
