"""Plug-ins that spoil chosen batches, for tests of recovery.

The source marks chosen records with one colour; the objective spoils the loss
of a batch that contains the mark. The harm depends on the data and not on the
step, so a skip list can avoid it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.data.sources import synthetic
from vit_jax.objectives import supervised

MARK = 255


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


class Objective(supervised.Objective):
  """A supervised objective whose loss is NaN for marked batches."""

  def loss(self, params, inputs):
    loss, aux = super().loss(params, inputs)
    hit = jnp.all(inputs.batch['image'] == MARK, axis=(1, 2, 3)).any()
    return jnp.where(hit, jnp.nan, loss), aux
