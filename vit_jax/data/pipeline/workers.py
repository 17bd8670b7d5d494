"""Who loads examples: threads of this process, or processes beside it."""

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


class Workers(Protocol):
  """Fills buffers in the background."""

  def buffers(self, rows: int) -> Any:
    """Something that a share can be filled into."""
    ...

  def fill(
    self, batch: Any, share: Share, first: int
  ) -> 'Future[list[BadRecord]]':
    """Starts loading a share into the rows from `first` on."""
    ...

  def result(self, future: 'Future[list[BadRecord]]') -> list[BadRecord]:
    """Waits for what `fill` started.

    Raises:
      UserError: what the loader raises; a worker process was killed.
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

  def result(self, future: Future) -> list[BadRecord]:
    return future.result()

  def collect(self, batch: HostBatch) -> HostBatch:
    return batch

  def close(self) -> None:
    self._pool.shutdown(wait=True, cancel_futures=True)


class Processes:
  """Processes that write into shared memory, reused from batch to batch.

  Started afresh ('spawn'), since a forked copy of a process that runs JAX may
  hang; the loader is sent to each of them once. The memory has no name that
  could outlive its users, and the workers end with this process, even where it
  is killed.
  """

  def __init__(self, loader: Loader, number: int, rows: int, batches: int):
    self._layout = loader.layout(rows)
    size = contract.num_bytes(self._layout)
    context = multiprocessing.get_context('spawn')
    # Unlinked as soon as it is made; workers inherit it when they start.
    self._memory = [context.RawArray('B', size) for _ in range(batches)]
    self._free = list(range(batches))
    self._pool = ProcessPoolExecutor(
      number,
      context,
      initializer=_start_worker,
      initargs=(loader, self._memory, self._layout),
    )

  def buffers(self, rows: int) -> int:
    del rows
    slot = self._free.pop()
    for array in _views(self._memory[slot], self._layout).values():
      array[...] = 0
    return slot

  def fill(self, batch: int, share: Share, first: int) -> Future:
    try:
      return self._pool.submit(_fill, batch, share, first)
    except BrokenProcessPool as error:
      failed = Future()
      failed.set_exception(error)
      return failed

  def result(self, future: Future) -> list[BadRecord]:
    try:
      return future.result()
    except BrokenProcessPool as error:
      raise UserError(
        'a reader process was killed, most often for want of memory (dmesg '
        'says so): lower reader.processes or reader.prefetch, or take threads '
        'with --config.reader.processes=0.'
      ) from error

  def collect(self, batch: int) -> HostBatch:
    # A copy: a CPU device would go on reading the memory that is reused.
    views = _views(self._memory[batch], self._layout)
    arrays = {key: array.copy() for key, array in views.items()}
    self._free.append(batch)
    return arrays

  def close(self) -> None:
    self._pool.shutdown(wait=True, cancel_futures=True)


def _views(memory: Any, layout: Any) -> HostBatch:
  """Arrays that lie one behind another in shared memory."""
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
