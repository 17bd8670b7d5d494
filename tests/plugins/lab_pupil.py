"""An objective outside the package: labels, and a frozen teacher."""

import jax
import optax

from vit_jax.errors import UserError
from vit_jax.objectives.contract import Objective as Base


class Objective(Base):
  """The mean of the loss of the labels and that of a teacher's outputs."""

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
    # The teacher has the same kind of model as the student.
    taught = model.apply({'params': inputs.frozen['teacher']}, images)
    labels = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    distance = optax.softmax_cross_entropy(logits, jax.nn.softmax(taught))
    metrics = {'distance': distance.mean()}
    return (labels + distance).mean() / 2, (metrics, {})
