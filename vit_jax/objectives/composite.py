"""A base class of objectives that train more than the model."""

from typing import Any

from jaxtyping import Array

from vit_jax.objectives.contract import Batch, Defaults, Setting
from vit_jax.objectives.mixing import normalize

PyTree = Any


class AroundModel(Defaults):
  """Answers for an objective that trains more than the model; a base class.

  Its parameters are `model/…`, the model's own, and others beside them: a
  decoder, a head. `init` and `loss` are yet to be defined.

  Attributes:
    setting: setting of the run.
  """

  setting: Setting

  @property
  def apart(self) -> tuple[str, ...]:
    """The model's."""
    return self.setting.model.apart

  def predict(self, params: PyTree, batch: Batch) -> dict[str, Array]:
    """Returns the model's outputs for whole images, without randomness.

    They are float32.
    """
    return self.setting.model.apply(
      {'params': params['model']}, normalize(batch['image']), method='predict'
    )

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the model's own parameters."""
    return params['model']

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Given ones of the model, the others fresh."""
    return params | {'model': model}
