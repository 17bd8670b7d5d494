"""Base class for objectives that train more than the model."""

from typing import Any

from jaxtyping import Array

from vit_jax.objectives.contract import Batch, Defaults, Setting
from vit_jax.objectives.mixing import normalize

PyTree = Any


class AroundModel(Defaults):
  """Base class for objectives that train more than the model.

  Parameters are `model/…`, those of the model, and others next to them, for
  example those of a decoder or a head. A subclass defines `init` and `loss`.

  Attributes:
    setting: setting of the run.
  """

  setting: Setting

  @property
  def apart(self) -> tuple[str, ...]:
    """Path suffixes of the model; see `models.contract.Model`."""
    return self.setting.model.apart

  def predict(self, params: PyTree, batch: Batch) -> dict[str, Array]:
    """Returns the model's outputs for whole images, float32."""
    return self.setting.model.apply(
      {'params': params['model']}, normalize(batch['image']), method='predict'
    )

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the model's own parameters."""
    return params['model']

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Returns the given parameters of the model; the others stay initial."""
    return params | {'model': model}
