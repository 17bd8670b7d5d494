"""Counts the bad records of an evaluation, over all processes."""

from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from vit_jax.arrays import sharding
from vit_jax.data.pipeline import stream, workers

PyTree = Any


class BadRecordCount:
  """Number of bad records in one sweep over a source.

  With a single process, the reader counts bad records, so nothing is counted
  here. With several processes, the rows that the global mask leaves out are
  counted, so that all processes stop at the same batch.
  """

  def __init__(
    self,
    source: stream.Source,
    settings: workers.Reader,
    mesh: Mesh,
    batch_size: int,
  ):
    """Starts at zero.

    Args:
      source: source of the evaluation.
      settings: reader settings with the policy for bad records.
      mesh: mesh of the devices.
      batch_size: size of the global batch.
    """
    self._source, self._settings = source, settings
    self._batch_size, self._remaining, self._bad = batch_size, len(source), 0
    self._sum = None
    if jax.process_count() > 1 and settings.on_bad_record == 'skip':
      replicated = sharding.replicated(mesh)
      self._sum = jax.jit(lambda mask: mask.sum(), out_shardings=replicated)

  def examples(self, batch: dict[str, Array]) -> Int[Array, ''] | None:
    """Returns the number of usable examples in a batch, on the devices.

    Returns None if bad records are not counted here.
    """
    return self._sum(batch['mask']) if self._sum else None

  def fetch(self, result: PyTree, examples: Int[Array, ''] | None) -> PyTree:
    """Fetches the result of a batch to the host, and counts its bad records.

    Args:
      result: result on the devices.
      examples: number of usable examples of the same batch, from `examples`.

    Raises:
      UserError: more records are bad than `reader.max_bad_share` allows.
    """
    result, examples = jax.device_get((result, examples))
    rows = min(self._batch_size, self._remaining)  # without padding
    self._remaining -= rows
    if examples is not None:
      self._bad += rows - int(examples)
      limit = self._settings.max_bad_share
      workers.check_share(
        self._bad, len(self._source), self._source.name, limit
      )
    return result
