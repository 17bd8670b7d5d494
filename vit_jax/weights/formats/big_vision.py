"""Weights with the names of big_vision: `big_vision:FILE.npz`.

The format `npz` also reads these files. They are written with the prefix
`params/` and unstacked layers; see `npz_vit` for the differences from the
official files.
"""

from typing import Any

import numpy as np

from vit_jax.arrays import tree
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  foreign,
  normalization,
  npz,
  npz_arrays,
  npz_notes,
  npz_vit,
)
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.naming import Naming

PyTree = Any
_NAMES = npz_vit.POOLING | npz_vit.names(
  npz_vit.NUMBERED_BLOCK, npz_vit.LATER, npz_vit.POSITION
)
load = npz.load


def matches(path: str) -> bool:
  """Returns False, because this format is selected by name only."""
  del path
  return False


def _has_slots(model: Any) -> bool:
  """Returns whether tokens before the patch tokens have learned positions."""
  learned = getattr(model, 'position', 'learned') == 'learned'
  return learned and getattr(model, 'prefix_positions', True)


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes parameters with big_vision's names, and notes next to the file.

  Args:
    path: path of the .npz file, local or gs://.
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`.

  Raises:
    UserError: big_vision has no name for a parameter, or a file cannot be
      written.
  """
  source = Pretrained('', about, lambda abstract: None)
  flat = tree.flatten(source.backbone(params))
  arrays = {name: np.asarray(leaf) for name, leaf in flat.items()}
  model = source.model()
  arrays = normalization.symmetric(arrays, model.normalization)
  foreign.check_positions(model, ('learned', 'sincos2d'))
  foreign.warn_of_defaults(path, model)
  if model.pool == 'token' and _has_slots(model):
    # big_vision's class token has no position: ours is added to the token.
    arrays = foreign.without_class_position(arrays, 'cls', 'position/embedding')
  exported = naming_lib.export(arrays, Naming(_NAMES, torch=False))
  npz_arrays.write(path, {f'params/{name}': x for name, x in exported})
  npz_notes.write(path, model, about)
