"""Base class for objectives that train more than the model."""

from typing import Any

from vit_jax.objectives.contract import Defaults

PyTree = Any


class AroundModel(Defaults):
  """Base class for objectives that train more than the model.

  The parameters of the model are `model/…`; others, for example those of a
  decoder or a head, are next to them. A subclass sets `setting` and defines
  `init` and `loss`.
  """

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the parameters of the model."""
    return params['model']

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Returns `params` with the given parameters of the model."""
    return params | {'model': model}
