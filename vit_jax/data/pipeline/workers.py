"""Workers that load examples, either threads or child processes."""

import dataclasses
import logging
import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from vit_jax.data import contract
from vit_jax.data.pipeline.loader import BadRecord, HostBatch, Loader, Share
from vit_jax.errors import UserError

log = logging.getLogger('vit_jax')

_MAX_RESTARTS = 3  # maximum number of restarts while loading the same examples


class Threads:
  """Threads of this process; decoding and resizing release the GIL."""

  def __init__(self, loader: Loader, number: int):
    self._loader = loader
    self._pool = ThreadPoolExecutor(number, 'reader')

  def buffers(self, rows: int) -> HostBatch:
    """Returns a buffer for a batch of `rows` examples."""
    return self._loader.buffers(rows)

  def fill(self, batch: HostBatch, share: Share, first: int) -> Future:
    """Starts loading a share into the rows of a buffer, starting at `first`.

    Returns:
      A task, the argument of `result`.
    """
    return self._pool.submit(self._loader.fill, batch, share, first)

  def result(self, task: Future) -> list[BadRecord]:
    """Waits for a task and returns the bad records that it has read.

    Raises:
      UserError: see `Loader.fill`; or worker processes were killed repeatedly.
    """
    return task.result()

  def collect(self, batch: HostBatch) -> HostBatch:
    """Returns the filled arrays after all tasks of the buffer are done."""
    return batch

  def close(self) -> None:
    """Stops the workers; tasks that have not started are cancelled."""
    self._pool.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass
class _Task:
  """A share that is loaded by worker processes.

  Attributes:
    arguments: arguments of `_fill`.
    pool: the pool to which the share was submitted.
    future: future of the bad records in the share.
  """

  arguments: tuple[int, Share, int]
  pool: ProcessPoolExecutor
  future: Future


class Processes:
  """Child processes that write batches into reused buffers of shared memory.

  The methods are those of `Threads`, with the index of a buffer as the batch.
  Processes are spawned, because a fork of a process that uses JAX may hang. The
  loader is sent to each process once. The shared memory is unlinked, so that it
  is freed with the last process that uses it. The workers end when this process
  ends, even if it is killed. If a worker is killed, all workers are restarted
  and unfinished shares are loaded again, with the same result.
  """

  def __init__(self, loader: Loader, number: int, rows: int, batches: int):
    self._loader, self._number = loader, number
    self._layout = loader.layout(rows)
    size = contract.num_bytes(self._layout)
    self._context = multiprocessing.get_context('spawn')
    # The memory is unlinked immediately; workers inherit it when they start.
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
            f'reader processes were killed {restarts + 1} times while loading '
            'the same examples, usually because the host ran out of memory '
            '(see dmesg): reduce reader.processes or reader.prefetch, or use '
            'threads with --config.reader.processes=0.'
          ) from error
      restarts += 1
      self._load_again(task)

  def _load_again(self, task: _Task) -> None:
    """Submits a task again, after restarting the workers if necessary."""
    if task.pool is self._pool:
      log.warning(
        'a reader process was killed, usually because the host ran out of '
        'memory (see dmesg); all reader processes are restarted.'
      )
      self._pool.shutdown(wait=True)  # old workers must not write any more
      self._pool = self._started()
    task.pool, task.future = self._pool, self._submit(task.arguments)

  def collect(self, batch: int) -> HostBatch:
    # The arrays are copied, because JAX on CPU may use their memory without
    # copying it, even after the buffer is reused.
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


# Loader, buffers and layout of a worker process, which the initializer of the
# pool sets once before the first task.
_worker: list[Any] = []


def _start_worker(loader: Loader, memories: list[Any], layout: Any) -> None:
  import cv2

  threading.Thread(target=_end_with_parent, daemon=True).start()
  cv2.setNumThreads(1)
  _worker.extend([loader, memories, layout])


def _end_with_parent() -> None:
  """Ends this process when its parent process ends for any reason.

  The workers of a pool wait for tasks on a pipe that the other workers keep
  open. If the parent were killed, they would otherwise wait forever.
  """
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _fill(slot: int, share: Share, first: int) -> list[BadRecord]:
  loader, memories, layout = _worker
  return loader.fill(_views(memories[slot], layout), share, first)
