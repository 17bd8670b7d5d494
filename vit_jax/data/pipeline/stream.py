"""Streams of global batches on the devices, for training and evaluation.

Batch s of a run depends only on the seed, s and the skip list. The example at
position p = s · batch_size + i is determined by `order.repeated` and
`order.shuffled`, and augmented with a random generator keyed by (seed, p). Each
process reads only the rows that its own devices hold. A stream therefore has no
state to save for resuming, and the batches do not depend on the number of
processes.
"""

import dataclasses
import itertools
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
from vit_jax.data.pipeline import order
from vit_jax.data.pipeline.loader import BadRecord, Loader, Share
from vit_jax.data.pipeline.reader import (
  BadRecords,
  Reader,
  Stream,
  host_batches,
)
from vit_jax.errors import UserError

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
  rows = _Rows.of(mesh, batch_size)
  loader = reader.loader(source, transform, seed)
  locate = getattr(source, 'locate', None)  # mixtures define their own order

  def shares() -> Iterator[Share]:
    for step in itertools.count(start_step):
      batch = order.batch_index(step, skipped)
      positions = batch * batch_size + rows.rows
      drawn = order.repeated(positions, batch_size, repeats)
      indices = (
        locate(drawn, seed)
        if locate
        else order.shuffled(drawn, len(source), seed)
      )
      yield Share(indices, positions)

  need = reader.memory_bytes(loader, len(rows.rows))
  log.info('prefetching uses up to %s of host memory', memory.text(need))
  spec = contract.train_spec(transform, reader.on_bad_record)
  return _stream(shares(), loader, reader, rows, spec, report)


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
  rows = _Rows.of(mesh, batch_size)
  loader = reader.loader(source, transform, 0)
  starts = range(0, len(source), batch_size)
  shares = (Share(start + rows.rows, None) for start in starts)
  spec = contract.eval_spec(transform)
  return _stream(shares, loader, reader, rows, spec, report)


def _stream(
  shares: Iterator[Share],
  loader: Loader,
  reader: Reader,
  rows: '_Rows',
  spec: Spec,
  report: Report,
) -> Stream:
  local = len(rows.rows)
  reader.check_memory(loader, local)
  # With several processes, the limit is checked for all of them together (by
  # `BadRecordLimit`, and by `sweep` in evaluation). If only one of them ended,
  # the others would wait for it forever.
  single = jax.process_count() == 1
  bad = BadRecords(
    loader.source, reader.max_bad_share if single else 1.0, report
  )
  batches = host_batches(shares, loader, reader, bad, local)
  return Stream(
    batches, lambda batch: {key: rows.to_global(batch[key]) for key in spec}
  )


@dataclasses.dataclass(frozen=True)
class _Rows:
  """The rows of a global batch that this process holds.

  Attributes:
    sharding: sharding of a global batch over its leading axis.
    batch_size: number of rows of the global batch.
    rows: indices of the rows on this process's devices, ascending.
  """

  sharding: jax.sharding.NamedSharding
  batch_size: int
  rows: Int[np.ndarray, ' local']

  @classmethod
  def of(cls, mesh: Mesh, batch_size: int) -> '_Rows':
    split = mesh.shape['data'] * mesh.shape['fsdp']
    if batch_size % split:
      raise UserError(
        f'batch_size is {batch_size}, which is not divisible by the {split} '
        f'devices along the mesh axes data and fsdp: use a multiple of {split}.'
      )
    spec = sharding.batch_sharding(mesh)
    slices = spec.addressable_devices_indices_map((batch_size,)).values()
    held = [np.arange(batch_size)[index] for index in slices]
    return cls(spec, batch_size, np.unique(np.concatenate(held)))

  def to_global(self, local: np.ndarray) -> jax.Array:
    """Puts this process's rows on its devices, as part of a global array."""

    def rows_of(index: Any) -> np.ndarray:
      start, stop, _ = index[0].indices(self.batch_size)
      first = int(np.searchsorted(self.rows, start))
      return local[first : first + stop - start]

    shape = (self.batch_size, *local.shape[1:])
    return jax.make_array_from_callback(shape, self.sharding, rows_of)
