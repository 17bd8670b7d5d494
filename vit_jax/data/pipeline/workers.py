"""Workers that load examples, and prefetching of batches.

Workers are threads or child processes. Batches are prefetched from the sources
to host memory (`host_batches`), and from there to the devices (`Stream`).
"""

import collections
import dataclasses
import logging
import multiprocessing
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cv2
import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.data import contract
from vit_jax.data.pipeline.loader import (
  POLICIES,
  BadRecord,
  HostBatch,
  Loader,
  LocalRows,
)
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.processes import interruption, machine

log = logging.getLogger('vit_jax')

_MAX_RESTARTS = 3  # maximum number of restarts while loading the same examples
# Loader, buffers and layouts of a worker process, which the initializer of the
# pool sets once before the first task.
_worker: list[Any] = []
Batch = dict[str, jax.Array]
_CHUNK = 16  # examples per task of a worker
_READY = 2  # batches on the devices that wait for the training step
_MEMORY_FRACTION = 0.8  # maximum fraction of the memory for batches


class Threads:
  """Threads of this process; decoding and resizing release the GIL."""

  def __init__(self, loader: Loader, number: int):
    self._loader = loader
    self._pool = ThreadPoolExecutor(number, 'reader')

  def buffers(self, rows: int, variant: int = 0) -> HostBatch:
    """Returns a buffer for a batch of `rows` examples of a variant."""
    return self._loader.buffers(rows, variant)

  def fill(self, batch: HostBatch, local: LocalRows, first: int) -> Future:
    """Starts loading examples into the rows of a buffer; see `Loader.fill`.

    Returns:
      A task, the argument of `result`.
    """
    return self._pool.submit(self._loader.fill, batch, local, first)

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


_Buffer = tuple[int, int]  # index of the memory, and of the variant
# Rows that worker processes load: the arguments of `_fill`, the pool to which
# they were submitted, and the future of the bad records.
_Task = tuple[tuple[_Buffer, LocalRows, int], ProcessPoolExecutor, Future]


class Processes:
  """Child processes that write batches into reused buffers of shared memory.

  The methods are those of `Threads`, with a `_Buffer` as the batch.
  Processes are spawned, because a fork of a process that uses JAX may hang. The
  loader is sent to each process once. The shared memory is unlinked, so that it
  is freed with the last process that uses it. The workers end when this process
  ends, even if it is killed. If a worker is killed, all workers are restarted
  and unfinished rows are loaded again, with the same result.
  """

  def __init__(self, loader: Loader, number: int, rows: int, batches: int):
    self._loader, self._number = loader, number
    self._layouts = [each.layout(rows) for each in loader.variants]
    size = max(map(contract.num_bytes, self._layouts))
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
      initargs=(self._loader, self._memory, self._layouts),
    )

  def buffers(self, rows: int, variant: int = 0) -> _Buffer:
    del rows  # all buffers have the number of rows given to `__init__`
    slot = self._free.pop()
    views = _views(self._memory[slot], self._layouts[variant])
    for array in views.values():
      array[...] = 0
    return slot, variant

  def fill(self, batch: _Buffer, local: LocalRows, first: int) -> _Task:
    try:
      future = self._pool.submit(_fill, batch, local, first)
    except BrokenProcessPool as error:  # `result` handles it
      future = Future()
      future.set_exception(error)
    return (batch, local, first), self._pool, future

  def result(self, task: _Task) -> list[BadRecord]:
    restarts = 0
    while True:
      arguments, pool, future = task
      try:
        return future.result()
      except BrokenProcessPool as error:
        if restarts == _MAX_RESTARTS:
          raise UserError(
            f'reader processes were killed {restarts + 1} times while loading '
            'the same examples, usually for lack of memory (see dmesg): reduce '
            'reader.prefetch or reader.processes (0 for threads).'
          ) from error
      # Several tasks fail with the same pool, which is replaced only once.
      if pool is self._pool:
        log.warning(
          'a reader process was killed, usually because the host ran out of '
          'memory (see dmesg); all reader processes are restarted.'
        )
        self._pool.shutdown(wait=True)  # old workers must not write any more
        self._pool = self._started()
      restarts += 1
      task = self.fill(*arguments)

  def collect(self, batch: _Buffer) -> HostBatch:
    slot, variant = batch
    # The arrays are copied, because JAX on CPU may use their memory without
    # copying it, even after the buffer is reused.
    views = _views(self._memory[slot], self._layouts[variant])
    arrays = {key: array.copy() for key, array in views.items()}
    self._free.append(slot)
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


def _start_worker(loader: Loader, memories: list[Any], layouts: Any) -> None:
  interruption.end_worker_with_parent()
  cv2.setNumThreads(1)
  _worker.extend([loader, memories, layouts])


def _fill(batch: _Buffer, local: LocalRows, first: int) -> list[BadRecord]:
  loader, memories, layouts = _worker
  slot, variant = batch
  return loader.fill(_views(memories[slot], layouts[variant]), local, first)


@schema.operational('threads', 'processes', 'prefetch', 'max_bad_share')
@dataclasses.dataclass(frozen=True)
class Reader:
  """Settings for reading data on a host.

  Attributes:
    threads: number of threads that read and decode images; 0 for one thread per
      core.
    processes: number of worker processes; if positive, they replace the
      threads. Processes are faster on hosts with so many cores that Python's
      global lock limits threads, at about 8,000 images/s.
    prefetch: number of batches that are prepared in advance on the host.
    on_bad_record: 'error' ends the run with a message that names file and
      index. 'skip' replaces the record by another one (in evaluation, masks
      it), counts it, and lists it once in events.jsonl.
    max_bad_share: fraction of the dataset that may be bad before a run ends.
  """

  threads: int = dataclasses.field(default=0, kw_only=True)
  processes: int = dataclasses.field(default=0, kw_only=True)
  prefetch: int = dataclasses.field(default=2, kw_only=True)
  on_bad_record: str = dataclasses.field(default='error', kw_only=True)
  max_bad_share: float = dataclasses.field(default=0.001, kw_only=True)

  def __post_init__(self):
    check_range('reader.threads', self.threads, at_least=0)
    check_range('reader.processes', self.processes, at_least=0)
    check_range('reader.prefetch', self.prefetch, at_least=1)
    check_range(
      'reader.max_bad_share', self.max_bad_share, at_least=0, at_most=1
    )
    check_choice('reader.on_bad_record', self.on_bad_record, POLICIES)

  def loader(self, source: Any, transform: Any, seed: int) -> Loader:
    """Returns a loader of a source's examples, with this `on_bad_record`."""
    return Loader(source, transform, seed, self.on_bad_record)

  def workers(self, loader: Loader, rows: int) -> Threads | Processes:
    """Starts the workers, which load batches of `rows` examples."""
    cv2.setNumThreads(1)  # images are decoded in parallel, one per thread
    if self.processes:
      batches = self.prefetch + 1
      return Processes(loader, self.processes, rows, batches)
    return Threads(loader, self.thread_count)

  @property
  def thread_count(self) -> int:
    """Number of threads; by default one per core available to this process."""
    return self.threads or machine.cores()

  def check_memory(self, loader: Loader, rows: int) -> int:
    """Checks that this host has enough memory for the prefetched batches.

    Returns:
      Maximum memory of the prefetched batches, bytes.

    Raises:
      UserError: the host does not have enough memory.
    """
    # Those being filled (see `host_batches`), and those of `Stream`.
    batches = self.prefetch + 1 + _READY + 1
    if self.processes:
      batches += self.prefetch + 1  # buffers in shared memory
    need = batches * max(
      contract.num_bytes(each.layout(rows)) for each in loader.variants
    )
    whole = machine.memory_bytes()
    if need > _MEMORY_FRACTION * whole:
      raise UserError(
        f'prefetching batches requires {need / 2**30:.1f} GiB of host memory, '
        f'but this process may use {whole / 2**30:.1f} GiB: reduce '
        f'reader.prefetch ({self.prefetch}), batch_size or image_size.'
      )
    return need


def allowed_bad(max_share: float, num_examples: int) -> float:
  """Returns the number of records of a dataset that may be bad, at least 1."""
  return max(max_share * num_examples, 1)


def check_share(
  bad: int, num_examples: int, name: str, max_share: float
) -> None:
  """Checks that the fraction of bad records in a dataset is allowed.

  Args:
    bad: number of distinct records that could not be used so far.
    num_examples: number of records of the dataset.
    name: name of the dataset, for the message.
    max_share: fraction of the records that may be bad; a single bad record is
      always allowed.

  Raises:
    UserError: more records are bad than allowed.
  """
  if bad > allowed_bad(max_share, num_examples):
    raise UserError(
      f'{bad} of the {num_examples} records of {name} cannot be used: repair '
      f'those in the log, or increase reader.max_bad_share ({max_share:.3%}).'
    )


def bad_record_log(
  source: Any, max_share: float, report: Callable[[str, BadRecord], None] | None
) -> Callable[[list[BadRecord]], None]:
  """Returns a function that logs and reports new bad records of a source.

  The function raises UserError if more records of the source are bad than
  allowed, see `check_share`.
  """
  seen: set[int] = set()

  def add(records: list[BadRecord]) -> None:
    for record in records:
      if record.index not in seen:
        seen.add(record.index)
        text = 'bad record %d of %s %s is skipped: %s'
        log.warning(
          text, record.index, source.name, record.where, record.reason
        )
        if report:
          report(source.name, record)
    check_share(len(seen), len(source), source.name, max_share)

  return add


def host_batches(
  local_batches: Iterable[LocalRows],
  loader: Loader,
  reader: Reader,
  note_bad: Callable[[list[BadRecord]], None],
  rows: int,
) -> Generator[HostBatch, None, None]:
  """Yields the batches; `reader.prefetch` later ones are being loaded."""
  pool: Any = reader.workers(loader, rows)
  pending: collections.deque[tuple[Any, list[Any]]] = collections.deque()

  def finished() -> HostBatch:
    batch, tasks = pending.popleft()
    for task in tasks:
      note_bad(pool.result(task))
    return pool.collect(batch)

  try:
    for local in local_batches:
      batch = pool.buffers(rows, local.variant)
      starts = range(0, len(local.indices), _CHUNK)
      tasks = [
        pool.fill(batch, local.part(start, start + _CHUNK), start)
        for start in starts
      ]
      pending.append((batch, tasks))
      if len(pending) > reader.prefetch:
        yield finished()
    while pending:
      yield finished()
  finally:
    pool.close()


class Stream(Iterator[Batch]):
  """Iterator of batches on the devices, prefetched by a background thread.

  An error in the background thread is raised by the call of `next` that would
  have returned the batch, and by all later calls. `close`, or leaving the
  `with` block, stops the threads.
  """

  def __init__(
    self,
    batches: Generator[HostBatch, None, None],
    to_global: Callable[[HostBatch], Batch],
  ):
    self._batches, self._to_global = batches, to_global
    self._pool = ThreadPoolExecutor(1, 'prefetch')
    # One thread loads them in this order.
    self._pending = collections.deque(
      self._pool.submit(self._load) for _ in range(_READY + 1)
    )

  def _load(self) -> Batch:
    return self._to_global(next(self._batches))

  def __next__(self) -> Batch:
    if not self._pending:  # closed
      raise StopIteration
    batch = self._pending[0].result()
    self._pending.popleft()
    self._pending.append(self._pool.submit(self._load))
    return batch

  def __enter__(self) -> 'Stream':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Stops the threads and discards the prefetched batches."""
    self._pool.shutdown(wait=True, cancel_futures=True)
    self._pending.clear()
    self._batches.close()
