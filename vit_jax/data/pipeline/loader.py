"""Loading single examples into rows of a batch, bad records included."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Int

from vit_jax.data import contract
from vit_jax.data.contract import Source, Spec, Transform
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import order
from vit_jax.errors import UserError

HostBatch = dict[str, np.ndarray]
POLICIES = ('error', 'skip')
_MAX_ATTEMPTS = 100  # replacements of one position before giving up


class BadRecord(NamedTuple):
  """A record that cannot be used.

  Attributes:
    index: in its source.
    where: file (and offset) if the source knows it.
    reason: description of the problem.
  """

  index: int
  where: str
  reason: str


class Share(NamedTuple):
  """One process's share of one batch.

  Attributes:
    indices: example of each row.
    positions: position of each row in the training; None in evaluation, where
      nothing is random and an index beyond the source's end leaves its row to
      padding.
  """

  indices: Int[np.ndarray, ' local']
  positions: Int[np.ndarray, ' local'] | None

  def part(self, start: int, stop: int) -> 'Share':
    """Some of the rows."""
    positions = self.positions
    return Share(
      self.indices[start:stop],
      None if positions is None else positions[start:stop],
    )


@dataclasses.dataclass(frozen=True)
class Loader:
  """Reads, decodes and transforms; can be sent to another process.

  Attributes:
    source: random access to examples.
    transform: makes of an example what a batch holds.
    seed: seed of the run.
    on_bad_record: 'error', or 'skip' (training takes a replacement that is a
      function of seed, position and attempt; evaluation leaves the row out).
  """

  source: Source
  transform: Transform
  seed: int
  on_bad_record: str

  @functools.cached_property
  def spec(self) -> Spec:
    """Shapes and dtypes of one transformed example."""
    return contract.check_spec(self.transform)

  def layout(self, rows: int) -> Spec:
    """Shapes and types of a batch: the transform's keys, and the loader's own.

    mask: False until filled; replaced: bad records met.
    """
    added = contract.MASK | contract.REPLACED
    return contract.layout(self.spec | added, rows)

  def buffers(self, rows: int) -> HostBatch:
    """Rows of padding (zeros), to be filled; see `layout`."""
    entries = self.layout(rows).items()
    return {key: np.zeros(shape, dtype) for key, (shape, dtype) in entries}

  def fill(self, batch: HostBatch, share: Share, first: int) -> list[BadRecord]:
    """Loads a share into the rows of a batch from `first` on.

    Returns:
      The bad records met on the way (none under 'error').

    Raises:
      UserError: a bad record under 'error', or no good one to be found.
    """
    bad: list[BadRecord] = []
    for offset, index in enumerate(share.indices.tolist()):
      row = first + offset
      if share.positions is not None:
        position = int(share.positions[offset])
        self._fill_train(batch, row, index, position, bad)
      elif index < len(self.source):
        self._fill_eval(batch, row, index, bad)
    return bad

  def _fill_train(
    self,
    batch: HostBatch,
    row: int,
    index: int,
    position: int,
    bad: list[BadRecord],
  ) -> None:
    for attempt in itertools.count():
      key, counter = [self.seed, position], [attempt, 0, 0, 0]
      rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
      record = self._fill_row(batch, row, index, rng)
      if record is None:
        batch['replaced'][row] = attempt
        return
      bad.append(record)
      if attempt == _MAX_ATTEMPTS:
        raise UserError(
          f'{self.source.name}: {_MAX_ATTEMPTS} records in a row cannot be '
          f'used, the last at index {index}: {record.reason}. Look at the data.'
        )
      allowed = self._replacements(index)
      number = order.replacement(position, attempt + 1, len(allowed), self.seed)
      index = allowed[number]

  def _replacements(self, index: int) -> range:
    """Returns the indices from which a bad record is replaced."""
    if hasattr(self.source, 'replacements'):
      return cast(Any, self.source).replacements(index)
    return range(len(self.source))

  def _fill_eval(
    self, batch: HostBatch, row: int, index: int, bad: list[BadRecord]
  ) -> None:
    record = self._fill_row(batch, row, index, None)
    if record is not None:
      bad.append(record)

  def _fill_row(
    self, batch: HostBatch, row: int, index: int, rng: Any
  ) -> BadRecord | None:
    """Loads one example; returns what is wrong with it, if anything."""
    try:
      values = self.transform(self.source[index], rng)
      contract.check_values(self.transform, values, self.spec)
      self._check_label(values)
    except DecodeError as error:
      where = getattr(self.source, 'where', lambda _: '')(index)
      if self.on_bad_record == 'error':
        place = f' ({where})' if where else ''
        raise UserError(
          f'example {index} of {self.source.name}{place} cannot be used: '
          f'{error}. Repair or remove it, or set --config.reader.on_bad_record='
          'skip.'
        ) from error
      return BadRecord(index, where, str(error))
    for key in self.spec:
      batch[key][row] = values[key]
    batch['mask'][row] = True
    return None

  def _check_label(self, values: dict[str, Any]) -> None:
    """Raises DecodeError if there is a label and it is out of range."""
    if 'label' not in self.spec or self.spec['label'][1].kind not in 'iu':
      return  # none, or shares of the classes
    label, last = np.asarray(values['label']), self.source.num_classes - 1
    if label.min() < 0 or label.max() > last:
      raise DecodeError(f'label {label}; allowed: 0 to {last}')
