"""Official `.npz` weights: Vision Transformers, hybrids, BiT's ResNets.

Files are written in Flax's original numbering of submodules. Next to a file,
`FILE.npz.json` holds what its arrays do not show, for readers in this package.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.models.layers import positions
from vit_jax.models.layers.norm import EPSILON
from vit_jax.models.stems.resnet import stride_of
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  foreign,
  npz_arrays,
  npz_notes,
  npz_resnet,
  npz_vit,
)
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.foreign import Described, Unseen
from vit_jax.weights.formats.naming import Naming

PyTree = Any
_BIT_SIZE = (224, 224)  # that of pre-training; any other fits, too
_COMPUTED = {'gelu': 'tanh', 'norm_eps': EPSILON}


def matches(path: str) -> bool:
  """Returns whether a path has the ending of the format."""
  return path.endswith('.npz')


def load(path: str) -> Pretrained:
  """Describes the weights in a file.

  Args:
    path: path of the file, local or gs://.

  Raises:
    UserError: the file is unreadable, or its arrays are not those of a model
      that has official weights.
  """
  arrays = npz_resnet.flattened(npz_arrays.read(path))
  bit = npz_resnet.BIT_ROOT in arrays
  found = _bit(path, arrays) if bit else _vit(path, arrays)
  return pretrained(path, found, 'the official JAX models')


def pretrained(path: str, found: Described, known_from: str) -> Pretrained:
  """Returns weights of a file whose pixels are in [-1, 1].

  Args:
    path: path of the file.
    found: properties that the arrays show.
    known_from: source of the others, if there are no notes next to the file.
  """
  unseen = Unseen(known_from, gelu='tanh')
  found = found._replace(computed=_COMPUTED)
  source = foreign.pretrained(path, found, npz_notes.read(path) or unseen)
  # Without this key, mean and std of the pixels are known and not assumed.
  about = {k: v for k, v in source.about.items() if k != 'normalization'}
  return dataclasses.replace(source, about=about)


def _bit(path: str, arrays: dict[str, np.ndarray]) -> Described:
  """Describes a BiT ResNet."""
  section = npz_resnet.section(path, arrays, npz_resnet.BIT_ROOT)
  naming = npz_resnet.bit_naming(section['depths'])
  return Described(arrays, naming, section, _BIT_SIZE)


def _vit(path: str, arrays: dict[str, np.ndarray]) -> Described:
  """Describes a Vision Transformer, with or without a ResNet as its stem."""
  numbering = npz_vit.numbering(arrays)
  keys = npz_vit.keys(path, arrays, numbering)
  keys['pool'] = 'token' if 'cls' in arrays else 'gap'
  names = npz_vit.names(
    npz_vit.NUMBERED_BLOCK, numbering, npz_vit.OFFICIAL_POSITION
  )
  side = keys['patch_size']
  if npz_resnet.ROOT in arrays:
    keys['stem'] = npz_resnet.section(path, arrays, npz_resnet.ROOT)
    names |= npz_resnet.stem_names(keys['stem']['depths'])
    side *= stride_of(keys['stem']['depths'])  # pixels for a patch
  slots = npz_vit.shape(path, arrays, npz_vit.OFFICIAL_POSITION, 3)[1]
  rows, columns = positions.square_grid(slots - (keys['pool'] == 'token'))
  naming = Naming(names, torch=False)
  return Described(arrays, naming, keys, (rows * side, columns * side))


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes parameters with the official names, and notes next to the file.

  Args:
    path: path of the .npz file, local or gs://.
    params: parameters of a ViT (`map` pooling has no official name), a hybrid
      or a ResNet, in this package's layout.
    about: description of the weights, see `Pretrained.about`; {} writes no
      notes.

  Raises:
    UserError: the parameters have no official name, or they cannot be written.
  """
  model = None
  if 'model' in about:
    source = Pretrained(path, about, lambda abstract: None)
    model = source.model()
    _check_positions(model)
    foreign.warn_of_defaults(path, model)
    params = source.backbone(params)
  flat = {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  arrays = npz_resnet.unflattened(
    dict(naming_lib.export(flat, _naming_of(flat)))
  )
  npz_arrays.write(path, arrays)
  if model is not None:
    npz_notes.write(path, model, about)


def _naming_of(flat: Mapping[str, np.ndarray]) -> Naming:
  """Returns the official names for parameters."""
  if 'block1/unit1/conv1/kernel' in flat:
    return npz_resnet.bit_naming(npz_resnet.stacked_depths(flat, ''))
  names = npz_vit.names(
    npz_vit.NUMBERED_BLOCK, npz_vit.ORIGINAL, npz_vit.OFFICIAL_POSITION
  )
  depths = npz_resnet.stacked_depths(flat, 'stem/')
  names |= npz_resnet.stem_names(depths)
  return Naming(names, torch=False)


def _check_positions(model: Any) -> None:
  """Raises UserError unless all tokens of a ViT have learned positions."""
  foreign.check_positions(model, ('learned',))
  if not getattr(model, 'prefix_positions', True):
    raise UserError(
      'official .npz files have a position for the class token, and this model '
      'has none: write a directory, or big_vision:FILE.npz.'
    )
