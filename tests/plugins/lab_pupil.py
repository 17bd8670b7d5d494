"""An objective of somebody's own: labels, and a teacher that never changes."""

import jax
import optax

from vit_jax.errors import UserError
from vit_jax.objectives.contract import Defaults


class Objective(Defaults):
  """Half labels, half what a trained model says."""

  def __init__(self, setting, /, *, teacher: str):
    self.setting, self.path = setting, teacher

  def frozen(self):
    teacher = self.setting.open_frozen(self.path)
    if teacher.model.num_classes != self.setting.model.num_classes:
      raise UserError(f'{self.path} knows other classes.')
    return {'teacher': teacher}

  def loss(self, params, inputs):
    images, targets = self.setting.mix(inputs.batch, inputs.key)
    model = self.setting.model
    logits = model.apply({'params': params}, images, inputs.key)
    # The lab has one kind of model, so the teacher computes as its pupil does.
    taught = model.apply({'params': inputs.frozen['teacher']}, images)
    labels = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    distance = optax.softmax_cross_entropy(logits, jax.nn.softmax(taught))
    metrics = {'distance': distance.mean()}
    return (labels + distance).mean() / 2, (metrics, {})
