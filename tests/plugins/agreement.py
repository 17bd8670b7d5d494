"""An objective without labels, outside the package: two crops, one feature."""

import dataclasses

import jax.numpy as jnp

from vit_jax.objectives.contract import Objective as Base
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.mixing import normalize


@dataclasses.dataclass(frozen=True)
class Objective(Base):
  """The squared distance between the features of two crops."""

  setting: Setting
  scale: float = dataclasses.field(default=1.0, kw_only=True)

  def init(self, key, batch):
    images = jnp.zeros((1, *batch['crops'].shape[2:]))
    return self.setting.model.init(key, images)['params'], {}

  def loss(self, params, inputs):
    first, second = (
      self._features(params, inputs.batch['crops'][:, i]) for i in (0, 1)
    )
    return self.scale * ((first - second) ** 2).mean(), ({}, {})

  def predict(self, params, batch, want=()):
    return {'features': self._features(params, batch['image'])}

  def _features(self, params, images):
    output = self.setting.model.apply(
      {'params': params}, normalize(images), method='predict'
    )
    return output['features']
