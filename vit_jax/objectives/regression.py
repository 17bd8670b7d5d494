"""Prediction of numbers with a squared error."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError
from vit_jax.objectives import contract
from vit_jax.objectives.contract import Batch, Inputs, Loss, PyTree


@dataclasses.dataclass(frozen=True)
class Objective(contract.Objective):
  """Prediction of numbers; an `objectives.contract.Objective`.

  A batch contains `image` `[n, y, x, channels]`, uint8 or uint16, and
  `numbers`, float32 `[n, num_classes]`. The model learns (number − mean) / std,
  so that the loss does not depend on units; `predict` returns the numbers
  themselves as `logits`.

  Attributes:
    setting: setting of the run.
    mean: mean of each number over the training data.
    std: standard deviation of each number, above 0.
  """

  setting: contract.Setting
  _: dataclasses.KW_ONLY
  mean: tuple[float, ...]
  std: tuple[float, ...]

  cross_entropy = 'squared'

  def check(self, spec: Spec) -> None:
    """Checks that there are as many outputs, means and stds as numbers.

    Raises:
      UserError: batches have no numbers, or another number of them; or a std is
        not positive.
    """
    require(spec, 'image', 'numbers', who="the objective 'regression'")
    outputs, sizes = self.setting.model.num_classes, spec['numbers'][0]
    counts = *sizes, outputs, len(self.mean), len(self.std)
    if len({*counts}) > 1 or min(self.std) <= 0:
      raise UserError(
        f'augment.numbers has {sizes[0]} names, config.num_classes is {outputs}'
        f', objective.mean {self.mean} and objective.std {self.std}: give an '
        'output, a mean and a std above 0 for each name.'
      )

  def loss(self, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the mean of the squared errors, in units of std²."""
    images, numbers = self.setting.mix(inputs.batch, inputs.key)
    outputs = self.setting.model.apply({'params': params}, images, inputs.key)
    targets = (numbers - jnp.array(self.mean)) / jnp.array(self.std)
    return jnp.square(outputs - targets).mean(), ({}, {})

  def predict(
    self, params: PyTree, batch: Batch, want: tuple[str, ...] = ()
  ) -> dict[str, Array]:
    """Returns the results of the model, with numbers as `logits`."""
    found = super().predict(params, batch, want)
    numbers = found['logits'] * jnp.array(self.std) + jnp.array(self.mean)
    return found | {'logits': numbers}
