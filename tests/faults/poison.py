"""Plug-ins that spoil chosen batches: named by configs in these tests only.

The source marks chosen records with one colour; the objective spoils the loss
or the gradient of a batch that holds the mark. So the harm follows the data,
not the step, and a skip list can avoid it.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.sources import synthetic
from vit_jax.objectives import supervised

MARK = 255
GOOD_CALLS = 7
_calls = itertools.count(1)


def _factor(_) -> np.ndarray:
  """1, and after `GOOD_CALLS` another number at every call."""
  return np.float32(1 + 1e-3 * max(next(_calls) - GOOD_CALLS, 0))


class Source(synthetic.Source):
  """Synthetic data; the training records in `marked` are all white."""

  def __init__(
    self,
    split: str,
    /,
    *,
    num_examples: int = 256,
    num_classes: int = 20,
    marked: tuple[int, ...] = (),
  ):
    super().__init__(split, num_examples=num_examples, num_classes=num_classes)
    self._marked = set(marked) if split.startswith('train[512') else set()

  def __getitem__(self, index: int) -> dict[str, Any]:
    example = super().__getitem__(index)
    if index in self._marked:
      example['image'] = np.full_like(example['image'], MARK)
    return example


@dataclasses.dataclass(frozen=True)
class Objective(supervised.Objective):
  """Supervised; a batch with a mark gets a bad loss or a bad gradient.

  Attributes:
    harm: 'loss' (NaN), 'gradient' (NaN with a finite loss), 'spike' (1000
      times the loss), or 'bits': whatever the batch, from the `GOOD_CALLS`-th
      evaluation on no two give the same loss.
  """

  harm: str = dataclasses.field(default='loss', kw_only=True)

  def loss(self, params, inputs):
    loss, aux = super().loss(params, inputs)
    batch = inputs.batch
    if self.harm == 'bits':
      factor = jax.ShapeDtypeStruct((), jnp.float32)
      return loss * jax.pure_callback(
        _factor, factor, batch['label'].sum()
      ), aux
    hit = jnp.all(batch['image'] == MARK, axis=(1, 2, 3)).any()
    if self.harm == 'loss':
      return jnp.where(hit, jnp.nan, loss), aux
    if self.harm == 'spike':
      return jnp.where(hit, 1000.0, 1.0) * loss, aux
    leaf = jax.tree.leaves(params)[0].sum()
    zero = (leaf - leaf) * hit  # √ has an infinite slope at 0
    return loss + jnp.where(hit, jnp.sqrt(zero), 0.0), aux
