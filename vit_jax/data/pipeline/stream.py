"""From sources to global arrays on the devices.

Batch s of a training depends on nothing but the seed and s (and the skip
list): position p = s · batch_size + i holds the example that `order.repeated`
and `order.shuffled` say, augmented by a generator keyed by (seed, p). Each
process reads just the positions that its own devices hold. Hence resuming needs
no state, and any number of processes sees the same batches.
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
  """Endless global batches, from the one after `start_step` updates on.

  Args:
    source: random access to examples.
    transform: makes of an example, with a generator, what a batch holds.
    batch_size: size of the global batch.
    seed: seed of the run.
    start_step: updates completed.
    mesh: devices; the batch is split over its `data` and `fsdp` axes.
    skipped: indices of batches never to be drawn.
    repeats: copies of each example in a batch, see `order.repeated`.
    reader: workers, prefetching, and what to do about bad records.
    report: called once with (source name, record) for each bad record.

  Returns:
    An iterator of batches: the keys of the transform's `spec` with `batch_size`
    examples each, and under `on_bad_record='skip'` replaced: int32
    `[batch_size]`, bad records met for each row; close it when done. It raises
    UserError for a bad record under 'error', naming source and index.
  """
  rows = _Rows.of(mesh, batch_size)
  loader = reader.loader(source, transform, seed)
  locate = getattr(source, 'locate', None)  # a mixture has its own order

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
  log.info('reading takes up to %s of host memory', memory.text(need))
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
  """Every example once, in order; the last batch is padded.

  Returns:
    An iterator like `train_batches`', with mask: bool `[batch_size]`, False on
    padding (all zeros) and on bad records that are skipped.
    Every process gets the same number of batches.
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
  # Several processes are checked together (`BadRecordLimit`, and `sweep` of an
  # evaluation), because one that ends alone would leave the others waiting.
  alone = jax.process_count() == 1
  bad = BadRecords(
    loader.source, reader.max_bad_share if alone else 1.0, report
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
    batch_size: rows of the global batch.
    rows: ascending row numbers held here.
  """

  sharding: jax.sharding.NamedSharding
  batch_size: int
  rows: Int[np.ndarray, ' local']

  @classmethod
  def of(cls, mesh: Mesh, batch_size: int) -> '_Rows':
    split = mesh.shape['data'] * mesh.shape['fsdp']
    if batch_size % split:
      raise UserError(
        f'a batch of {batch_size} is not divisible over the {split} shares of '
        f'the mesh axes data x fsdp: take a multiple of {split}.'
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
