"""Supervised classification: images and labels in, cross-entropy out."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.data.device_augment import DeviceAugment, normalize
from vit_jax.errors import UserError, check_range
from vit_jax.losses import LOSSES

PyTree = Any
Batch = dict[str, Array]  # image: uint8 [n, y, x, 3]; label: int32 [n]


@dataclasses.dataclass(frozen=True)
class Objective:
  """Classification of labelled images.

  Attributes:
    model: see `vit_jax.models`.
    augment: of training batches, on the device; by default none.
    cross_entropy: 'softmax' or 'sigmoid', see `vit_jax.losses`.
    label_smoothing: α of that loss, in [0, 1); with 'sigmoid' below .5, from
      where on a label would count against its class.
  """

  model: Any
  augment: DeviceAugment = DeviceAugment(0)
  cross_entropy: str = dataclasses.field(default='softmax', kw_only=True)
  label_smoothing: float = dataclasses.field(default=0.0, kw_only=True)

  def __post_init__(self):
    if self.cross_entropy not in LOSSES:
      raise UserError(
        f'objective.cross_entropy is {self.cross_entropy!r}; allowed: '
        f'{", ".join(LOSSES)}.'
      )
    limit = 0.5 if self.cross_entropy == 'sigmoid' else 1
    check_range(
      'objective.label_smoothing', self.label_smoothing, at_least=0, below=limit
    )

  def init(
    self, key: Key[Array, ''], batch: dict[str, Any]
  ) -> tuple[PyTree, PyTree]:
    """Fresh parameters for images of the batch's size, and no extra state."""
    image = normalize(jnp.zeros((1, *batch['image'].shape[1:]), jnp.uint8))
    return self.model.init(key, image)['params'], {}

  def loss(
    self, params: PyTree, extra: PyTree, batch: Batch, key: Key[Array, '']
  ) -> tuple[Float[Array, ''], dict[str, Float[Array, '']]]:
    """Mean loss of a batch; the key drives augmentation and dropout."""
    del extra
    images, targets = self.augment(batch, key)
    logits = self.model.apply({'params': params}, images, key)
    loss = LOSSES[self.cross_entropy]
    return loss(logits, targets, self.label_smoothing).mean(), {}

  def update_extra(self, params: PyTree, extra: PyTree, step: Array) -> PyTree:
    """Nothing to update."""
    del params, step
    return extra

  def predict(self, params: PyTree, batch: Batch) -> dict[str, Array]:
    """Features and logits of a batch, nothing random; float32."""
    images = normalize(batch['image'])
    return self.model.apply(
      {'params': params}, images, method=self.model.predict
    )
