"""Base class for objectives that train more than the model."""

from typing import Any

from vit_jax.objectives.contract import Defaults

PyTree = Any


class AroundModel(Defaults):
  """Base class for objectives that train more than the model.

  Parameters are `model/…`, those of the model, and others next to them, for
  example those of a decoder or a head. A subclass sets `setting` and defines
  `init` and `loss`.
  """

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the model's own parameters."""
    return params['model']

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Returns the given parameters of the model; the others stay initial."""
    return params | {'model': model}
