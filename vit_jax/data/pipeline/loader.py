"""Loads examples into the rows of a batch and handles bad records."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from vit_jax.data import contract
from vit_jax.data.contract import Source, Spec, Transform
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import order
from vit_jax.errors import UserError

HostBatch = dict[str, np.ndarray]
POLICIES = ('error', 'skip')
_MAX_ATTEMPTS = 100  # replacements at one position


class BadRecord(NamedTuple):
  """A record that cannot be used.

  Attributes:
    index: index in the source.
    where: file (and offset) of the record, or '' if the source does not
      provide it.
    reason: description of the problem.
  """

  index: int
  where: str
  reason: str


class LocalRows(NamedTuple):
  """The rows of a batch that one process loads.

  Attributes:
    indices: index of the example in each row.
    positions: position of each row, counted from the start of training. None in
      evaluation, where no random numbers are used, and where a row is padding
      if its index is beyond the end of the source.
    variant: index of the loader's variant that loads them.
  """

  indices: Int[np.ndarray, ' local']
  positions: Int[np.ndarray, ' local'] | None
  variant: int = 0

  def part(self, start: int, stop: int) -> 'LocalRows':
    """Returns the rows from `start` up to `stop`."""
    positions = self.positions
    return self._replace(
      indices=self.indices[start:stop],
      positions=None if positions is None else positions[start:stop],
    )


@dataclasses.dataclass(frozen=True)
class Loader:
  """Reads, decodes and transforms examples; supports pickling.

  Attributes:
    source: source of the examples.
    transform: transform of each example.
    seed: seed of the run.
    on_bad_record: 'error' or 'skip'. With 'skip', training replaces a bad
      record by another record, determined by seed, position and attempt, and
      evaluation masks the row.
  """

  source: Source
  transform: Transform
  seed: int
  on_bad_record: str

  @functools.cached_property
  def spec(self) -> Spec:
    """Shapes and dtypes of one transformed example."""
    return contract.check_spec(self.transform)

  @functools.cached_property
  def variants(self) -> tuple['Loader', ...]:
    """Loaders of the variants of the transform; see `data.contract`."""
    return tuple(
      dataclasses.replace(self, transform=transform)
      for _, transform in contract.variants(self.transform)
    )

  def layout(self, rows: int) -> Spec:
    """Returns shapes and dtypes of a batch, of a loader without variants.

    In addition to the keys of the transform, a batch contains `mask`, which is
    False on rows that are not filled, and `replaced`, the number of bad records
    that were replaced.
    """
    added = contract.MASK | contract.REPLACED
    return contract.layout(self.spec | added, rows)

  def buffers(self, rows: int, variant: int = 0) -> HostBatch:
    """Returns a batch of zeros, whose rows are filled later; see `layout`."""
    entries = self.variants[variant].layout(rows).items()
    return {key: np.zeros(shape, dtype) for key, (shape, dtype) in entries}

  def fill(
    self, batch: HostBatch, local: LocalRows, first: int
  ) -> list[BadRecord]:
    """Loads examples into the rows of a batch, starting at row `first`.

    Args:
      batch: result of `buffers`.
      local: rows of the global batch to load.
      first: row of `batch` for the first of them.

    Returns:
      The bad records that were read; [] with on_bad_record='error'.

    Raises:
      UserError: a record is bad and on_bad_record is 'error', or too many
        replacements of a record are also bad.
    """
    bad: list[BadRecord] = []
    loader = self.variants[local.variant]
    for offset, index in enumerate(local.indices.tolist()):
      row = first + offset
      if local.positions is not None:
        position = int(local.positions[offset])
        bad += loader._fill_in_training(batch, row, index, position)
      elif index < len(self.source):  # otherwise, the row is padding
        if record := loader._fill_row(batch, row, index, None, 0):
          bad.append(record)
    return bad

  def _fill_in_training(
    self, batch: HostBatch, row: int, index: int, position: int
  ) -> list[BadRecord]:
    """Loads an example, or a replacement, and returns the bad records."""
    bad: list[BadRecord] = []
    while len(bad) <= _MAX_ATTEMPTS:
      record = self._fill_row(batch, row, index, position, len(bad))
      if record is None:
        return bad
      bad.append(record)
      index = self._replacement(index, position, len(bad))
    raise UserError(
      f'{len(bad)} records of {self.source.name} in a row cannot be used, the '
      f'last at index {bad[-1].index} ({bad[-1].reason}): check the data with '
      'python -m vit_jax.check_data.'
    )

  def _replacement(self, index: int, position: int, attempt: int) -> int:
    """Returns the index of the example that replaces a bad one in training."""
    allowed = self.source.replacements(index)
    number = order.replacement(position, attempt, len(allowed), self.seed)
    return int(allowed[number])

  def _fill_row(
    self,
    batch: HostBatch,
    row: int,
    index: int,
    position: int | None,
    attempt: int,
  ) -> BadRecord | None:
    """Loads one example; returns a description if it is a bad record.

    Args:
      batch: result of `buffers`.
      row: row of the batch.
      index: index of the example in the source.
      position: position in training, or None in evaluation.
      attempt: number of bad records so far at this position.
    """
    rng, added = None, {}
    if position is not None:
      # Philox is counter-based, so no state of the run is needed.
      key, counter = [self.seed, position], [attempt, 0, 0, 0]
      rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
      added = {'run_seed': self.seed, 'run_position': position}
    try:
      values = self.transform(added | self.source[index], rng)
      contract.check_values(self.transform, values, self.spec)
      # There may be no label, or a soft one.
      if 'label' in self.spec and self.spec['label'][1].kind in 'iu':
        contract.check_label(values['label'], self.source.num_classes)
    except DecodeError as error:
      where = self.source.where(index)
      if self.on_bad_record == 'error':
        location = f' ({where})' if where else ''
        raise UserError(
          f'example {index} of {self.source.name}{location} cannot be used: '
          f'{error}. Repair it, or set --config.reader.on_bad_record=skip.'
        ) from error
      return BadRecord(index, where, str(error))
    for key in self.spec:
      batch[key][row] = values[key]
    batch['mask'][row], batch['replaced'][row] = True, attempt
    return None
