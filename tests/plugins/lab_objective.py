"""An objective outside the package: labels, and an averaged teacher.

The student learns the labels and, increasingly, the teacher's logits minus
their mean (the centre).
"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.objectives.contract import Objective as Base


class Objective(Base):
  """Extra state: the teacher's parameters and the centre of its logits."""

  def __init__(
    self, setting, /, *, decay: float = 0.5, warmup: str = '4 steps'
  ):
    self.setting = setting
    self.decay = decay
    self.warmup_steps = setting.steps(warmup)

  def init(self, key, batch):
    params = self.setting.init_model(key)
    return params, self.start_extra(params, {})

  def start_extra(self, params, extra):
    centre = jnp.zeros(self.setting.model.num_classes)
    return {'teacher': params, 'centre': centre}

  def loss(self, params, inputs):
    images, targets = self.setting.mix(inputs.batch, inputs.key)
    model = self.setting.model
    logits = model.apply({'params': params}, images, inputs.key)
    taught = model.apply({'params': inputs.extra['teacher']}, images)
    share = jnp.minimum(1, inputs.step / max(self.warmup_steps, 1))
    aims = jax.nn.softmax(taught - inputs.extra['centre'])
    distance = optax.softmax_cross_entropy(logits, aims).mean()
    labels = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    loss = labels.mean() + share * distance
    return loss, ({'distance': distance}, {'centre': taught.mean(0)})

  def update_extra(self, params, extra, carry, step):
    new = {'teacher': params, 'centre': carry['centre']}
    return optax.incremental_update(new, extra, 1 - self.decay)

  def weights(self, params, extra):
    return {'params': params, 'teacher': extra['teacher']}
