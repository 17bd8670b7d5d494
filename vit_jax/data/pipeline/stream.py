"""Streams of global batches on the devices, for training and evaluation.

Batch s of a run depends only on the seed, s and the skip list. The example at
position p = s · batch_size + i is determined by `order.repeated` and
`order.shuffled`, and augmented with a random generator keyed by (seed, p). Each
process reads only the rows that its own devices hold. A stream therefore has no
state to save for resuming, and the batches do not depend on the number of
processes.

`BadRecordLimit` ends a run in which too many records are bad, counted over all
processes.
"""

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from vit_jax.arrays import memory, sharding
from vit_jax.data import contract
from vit_jax.data.contract import Source, Spec, Transform
from vit_jax.data.pipeline import order, workers
from vit_jax.data.pipeline.loader import BadRecord, Loader, LocalRows
from vit_jax.data.pipeline.workers import (
  Reader,
  Stream,
  host_batches,
)
from vit_jax.errors import UserError
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
Report = Callable[[str, BadRecord], None] | None


def train_batches(
  source: Source,
  transform: Transform,
  batch_size: int,
  seed: int,
  start_step: int,
  mesh: Mesh,
  *,
  skipped: tuple[int, ...] = (),
  repeats: int = 1,
  reader: Reader = Reader(),  # noqa: B008 (frozen)
  report: Report = None,
) -> Stream:
  """Returns an infinite stream of batches, starting after `start_step` updates.

  Args:
    source: source of the examples.
    transform: transform of each example, called with a random generator.
    batch_size: size of the global batch.
    seed: seed of the run.
    start_step: number of completed updates.
    mesh: device mesh; the batch is split over its `data` and `fsdp` axes.
    skipped: indices of batches that are left out.
    repeats: number of copies of each example in a batch, see `order.repeated`.
    reader: settings of workers, prefetching and bad records.
    report: function that is called once with (source name, record) for each bad
      record.

  Returns:
    An iterator of batches, which must be closed after use. A batch contains the
    keys of the transform's `spec` with a leading axis of `batch_size` and, with
    `on_bad_record='skip'`, `replaced`, int32 `[batch_size]`, the number of bad
    records that were replaced in each row. With `on_bad_record='error'`, the
    iterator raises UserError with source and index of the first bad record.
  """
  rows = _Rows(mesh, batch_size)
  loader = reader.loader(source, transform, seed)
  several = len(loader.variants) > 1
  with_variants: Any = transform  # has the method `variant` if `several`

  def local_batches() -> Iterator[LocalRows]:
    for step in itertools.count(start_step):
      batch = order.batch_index(step, skipped)
      positions = batch * batch_size + rows.rows
      drawn = order.repeated(positions, batch_size, repeats)
      variant = with_variants.variant(seed, batch) if several else 0
      yield LocalRows(source.locate(drawn, seed), positions, variant)

  used = reader.check_memory(loader, len(rows.rows))
  log.info('prefetching uses up to %s of host memory', memory.text(used))
  spec = contract.train_spec(transform, reader.on_bad_record)
  return _stream(local_batches(), loader, reader, rows, spec, report)


def eval_batches(
  source: Source,
  transform: Transform,
  batch_size: int,
  mesh: Mesh,
  *,
  reader: Reader = Reader(),  # noqa: B008 (frozen)
  report: Report = None,
) -> Stream:
  """Returns a stream of all examples in order; the last batch is padded.

  The arguments are those of `train_batches`.

  Returns:
    An iterator of batches as in `train_batches`, but with `mask` in place of
    `replaced`: bool `[batch_size]`, False on padding (zeros) and on skipped bad
    records. Every process receives the same number of batches.
  """
  rows = _Rows(mesh, batch_size)
  loader = reader.loader(source, transform, 0)
  reader.check_memory(loader, len(rows.rows))
  starts = range(0, len(source), batch_size)
  local_batches = (LocalRows(start + rows.rows, None) for start in starts)
  spec = contract.eval_spec(transform)
  return _stream(local_batches, loader, reader, rows, spec, report)


def _stream(
  local_batches: Iterator[LocalRows],
  loader: Loader,
  reader: Reader,
  rows: '_Rows',
  spec: Spec,
  report: Report,
) -> Stream:
  # With several processes, the limit is checked for all of them together (by
  # `BadRecordLimit`, and by `sweep` in evaluation). If only one of them ended,
  # the others would wait for it forever.
  single = jax.process_count() == 1
  max_share = reader.max_bad_share if single else 1.0
  note_bad = workers.bad_record_log(loader.source, max_share, report)
  local = len(rows.rows)
  batches = host_batches(local_batches, loader, reader, note_bad, local)
  return Stream(
    batches, lambda batch: {key: rows.to_global(batch[key]) for key in spec}
  )


class _Rows:
  """The rows of a global batch that this process holds.

  Attributes:
    rows: indices of the rows on this process's devices, ascending.
  """

  rows: Int[np.ndarray, ' local']

  def __init__(self, mesh: Mesh, batch_size: int):
    split = sharding.batch_parts(mesh)
    if batch_size % split:
      raise UserError(
        f'batch_size is {batch_size}, which is not divisible by the {split} '
        f'devices along the mesh axes data and fsdp: use a multiple of {split}.'
      )
    self._batch_size = batch_size
    self._sharding = sharding.batch_sharding(mesh)
    devices = self._sharding.addressable_devices_indices_map((batch_size,))
    held = [np.arange(batch_size)[index] for index in devices.values()]
    self.rows = np.unique(np.concatenate(held))

  def to_global(self, local: np.ndarray) -> jax.Array:
    """Puts this process's rows on its devices, as part of a global array."""

    def rows_of(index: Any) -> np.ndarray:  # a slice of each axis
      start, stop, _ = index[0].indices(self._batch_size)
      first = int(np.searchsorted(self.rows, start))
      return local[first : first + stop - start]

    shape = (self._batch_size, *local.shape[1:])
    return jax.make_array_from_callback(shape, self._sharding, rows_of)


class BadRecordLimit:
  """Ends a run in which too many distinct training records are bad.

  Each record is counted once even if it is read many times, as the records of a
  small member of a mixture are. Each process stores the bad records that it has
  read. The training step only sums, over all processes, how often bad records
  were read. The sum of these reads since the last exchange and of the distinct
  bad records at that exchange is an upper bound on the number of distinct bad
  records. The processes exchange their records only when the bound exceeds the
  limit, which happens at the same step on all processes.
  """

  def __init__(
    self, max_share: float, num_examples: int, name: str = 'the training data'
  ):
    """Starts without bad records.

    Args:
      max_share: fraction of the records that may be bad.
      num_examples: number of records.
      name: name of the data, for messages.
    """
    self._max_share, self._num_examples = max_share, num_examples
    self._name = name
    self._own: set[int] = set()  # the prefetching thread adds to it
    self._counted = 0  # distinct bad records at the last exchange
    self._since = 0  # reads of bad records since then

  def reporting(self, report: Report) -> Report:
    """Returns a function that stores bad records and then reports them.

    Args:
      report: see `stream.train_batches`.
    """

    def store_and_report(source: str, record: BadRecord) -> None:
      self._own.add(record.index)
      if report:
        report(source, record)

    return store_and_report

  def add(self, reads: int) -> None:
    """Adds the bad records of a step. All processes must call this method.

    Args:
      reads: number of reads of bad records, summed over all processes.

    Raises:
      UserError: more records are bad than allowed.
    """
    self._since += reads
    allowed = workers.allowed_bad(self._max_share, self._num_examples)
    if self._counted + self._since > allowed:
      records = consensus.gather_text(json.dumps(list(self._own)))
      self._counted = len(set().union(*map(json.loads, records)))
      self._since = 0
      workers.check_share(
        self._counted, self._num_examples, self._name, self._max_share
      )
