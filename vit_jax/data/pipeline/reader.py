"""Prefetching of batches, from sources to host memory and to the devices."""

import collections
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import cv2
import jax

from vit_jax.config import plugins
from vit_jax.data import contract
from vit_jax.data.pipeline import workers
from vit_jax.data.pipeline.loader import (
  POLICIES,
  BadRecord,
  HostBatch,
  Loader,
  Share,
)
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.files import machine

log = logging.getLogger('vit_jax')
Batch = dict[str, jax.Array]
_CHUNK = 16  # examples per task of a worker
_READY = 2  # batches prefetched to the devices
_MEMORY_FRACTION = 0.8  # maximum fraction of the memory for batches


@plugins.operational('threads', 'processes', 'prefetch', 'max_bad_share')
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

  def workers(
    self, loader: Loader, rows: int
  ) -> workers.Threads | workers.Processes:
    """Starts the workers, which load batches of `rows` examples."""
    cv2.setNumThreads(1)  # images are decoded in parallel, one per thread
    if self.processes:
      batches = self.prefetch + 1
      return workers.Processes(loader, self.processes, rows, batches)
    return workers.Threads(loader, self.thread_count)

  @property
  def thread_count(self) -> int:
    """Number of threads; by default one per core available to this process."""
    return self.threads or machine.cores()

  def memory_bytes(self, loader: Loader, rows: int) -> int:
    """Returns the maximum host memory of the prefetched batches, in bytes."""
    batches = self.prefetch + 1 + _READY + 1
    if self.processes:
      batches += self.prefetch + 1  # buffers in shared memory
    return batches * contract.num_bytes(loader.layout(rows))

  def check_memory(self, loader: Loader, rows: int) -> None:
    """Checks that this host has enough memory for the prefetched batches.

    Raises:
      UserError: the host does not have enough memory.
    """
    need, whole = self.memory_bytes(loader, rows), machine.memory_bytes()
    if whole is not None and need > _MEMORY_FRACTION * whole:
      raise UserError(
        f'prefetching batches requires {need / 2**30:.1f} GiB of host memory, '
        f'but this process may use {whole / 2**30:.1f} GiB: reduce '
        f'reader.prefetch (currently {self.prefetch}), batch_size or '
        'image_size, or use more hosts.'
      )


def allowed_bad(max_share: float, num_examples: int) -> float:
  """Returns the number of records of a dataset that may be bad, at least 1."""
  return max(max_share * num_examples, 1)


def check_share(
  bad: int,
  num_examples: int,
  name: str,
  max_share: float,
  where: str = 'events.jsonl',
) -> None:
  """Checks that the fraction of bad records in a dataset is allowed.

  Args:
    bad: number of distinct records that could not be used so far.
    num_examples: number of records of the dataset.
    name: name of the dataset, for the message.
    max_share: fraction of the records that may be bad; a single bad record is
      always allowed.
    where: name of the file that lists the bad records, for the message.

  Raises:
    UserError: more records are bad than allowed.
  """
  if bad > allowed_bad(max_share, num_examples):
    raise UserError(
      f'{bad} of the {num_examples} records of {name} cannot be used, which is '
      f'more than reader.max_bad_share allows ({max_share:.3%}). They are '
      f'listed in {where}. Repair or remove them, or increase '
      'reader.max_bad_share.'
    )


class BadRecords:
  """The distinct bad records of a source that this process has read."""

  def __init__(
    self,
    source: Any,
    max_share: float,
    report: Callable[[str, BadRecord], None] | None,
  ):
    self._source = source
    self._max = max_share
    self._report = report
    self._seen: set[int] = set()

  def add(self, records: Iterable[BadRecord]) -> None:
    """Adds bad records; logs and reports new ones.

    Raises:
      UserError: more records of the source are bad than allowed.
    """
    for record in records:
      if record.index in self._seen:
        continue
      self._seen.add(record.index)
      log.warning(
        'bad record %d of %s %s is skipped: %s',
        record.index,
        self._source.name,
        record.where,
        record.reason,
      )
      if self._report:
        self._report(self._source.name, record)
    where = 'events.jsonl' if self._report else 'the log'
    source = self._source
    check_share(len(self._seen), len(source), source.name, self._max, where)


def host_batches(
  shares: Iterable[Share],
  loader: Loader,
  reader: Reader,
  bad: BadRecords,
  rows: int,
) -> Generator[HostBatch, None, None]:
  """Yields a batch for each share; `reader.prefetch` more are being loaded."""
  pool: Any = reader.workers(loader, rows)

  def submit(share: Share) -> tuple[Any, list[Any]]:
    batch, n = pool.buffers(rows), len(share.indices)
    starts = range(0, n, _CHUNK)
    return batch, [
      pool.fill(batch, share.part(i, min(i + _CHUNK, n)), i) for i in starts
    ]

  def finish(batch: Any, tasks: list[Any]) -> HostBatch:
    for task in tasks:
      bad.add(pool.result(task))
    return pool.collect(batch)

  pending: collections.deque[tuple[Any, list[Any]]] = collections.deque()
  try:
    for share in shares:
      pending.append(submit(share))
      if len(pending) > reader.prefetch:
        yield finish(*pending.popleft())
    while pending:
      yield finish(*pending.popleft())
  finally:
    pool.close()


class Stream(Iterator[Batch]):
  """Iterator of batches on the devices, prefetched by a background thread.

  An error in the background thread is raised by the call of `next` that would
  have returned the batch. `close`, or leaving the `with` block, stops the
  threads.
  """

  def __init__(
    self,
    batches: Generator[HostBatch, None, None],
    to_global: Callable[[HostBatch], Batch],
  ):
    self._ready: queue.Queue[Batch | BaseException] = queue.Queue(_READY)
    self._closed = threading.Event()
    self._thread = threading.Thread(
      target=self._work, args=(batches, to_global), daemon=True
    )
    self._thread.start()

  def __next__(self) -> Batch:
    if self._closed.is_set():
      raise StopIteration
    item = self._ready.get()
    if isinstance(item, BaseException):
      self._ready.put(item)  # later calls raise the same error
      raise item
    return item

  def __enter__(self) -> 'Stream':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Stops the threads and discards the prefetched batches."""
    self._closed.set()
    self._thread.join()

  def _work(self, batches, to_global) -> None:
    try:
      for batch in batches:
        if not self._put(to_global(batch)):
          return
      self._put(StopIteration())
    except BaseException as error:  # noqa: BLE001 (raised again by `next`)
      self._put(error)
    finally:
      batches.close()

  def _put(self, item: Batch | BaseException) -> bool:
    while not self._closed.is_set():
      try:
        self._ready.put(item, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False
