"""Fraction of bad records in an evaluation, over all processes."""

from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from vit_jax.arrays import sharding
from vit_jax.data.pipeline import reader, stream

PyTree = Any


class Share:
  """Counts the bad records of one sweep over a source.

  A single process counts them while it reads. Several processes count the rows
  that the global mask leaves out, so that all of them stop at the same batch.
  """

  def __init__(
    self,
    source: stream.Source,
    settings: reader.Reader,
    mesh: Mesh,
    batch_size: int,
  ):
    """Starts at zero.

    Args:
      source: source of the evaluation.
      settings: reader settings with the policy for bad records.
      mesh: the devices.
      batch_size: size of the global batch.
    """
    self._source, self._settings = source, settings
    self._batch_size, self._left, self._bad = batch_size, len(source), 0
    self._count = None
    if jax.process_count() > 1 and settings.on_bad_record == 'skip':
      everywhere = sharding.replicated(mesh)
      self._count = jax.jit(lambda mask: mask.sum(), out_shardings=everywhere)

  def count(self, batch: dict[str, Array]) -> Int[Array, ''] | None:
    """Returns the number of examples in a batch, if bad records are counted."""
    return self._count(batch['mask']) if self._count else None

  def judged(self, result: PyTree, examples: Int[Array, ''] | None) -> PyTree:
    """Returns the result of a batch on the host, and counts its bad records.

    Args:
      result: the result, on the devices.
      examples: examples of the same batch, from `count`.

    Raises:
      UserError: more records are bad than `reader.max_bad_share` allows.
    """
    result, examples = jax.device_get((result, examples))
    rows = min(self._batch_size, self._left)
    self._left -= rows
    if examples is not None:
      self._bad += rows - int(examples)
      share = self._settings.max_bad_share
      reader.check_share(self._bad, len(self._source), self._source.name, share)
    return result
