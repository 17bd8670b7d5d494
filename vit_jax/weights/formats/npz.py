"""Weights of Google's JAX projects: `.npz`.

Official Vision Transformers, hybrids and BiT's ResNets, and big_vision's plain
Vision Transformers can be read. Official names are written, with Flax's
original numbering of submodules; `big_vision` writes those of big_vision.
`FILE.npz.json` contains settings that the arrays do not determine, and is read
only by this package.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.models import positions
from vit_jax.models.layers import EPSILON
from vit_jax.models.resnet import stride_of
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  foreign,
  normalization,
  npz_arrays,
  npz_notes,
  npz_resnet,
  npz_vit,
)
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.foreign import Described, Unseen
from vit_jax.weights.formats.naming import Naming

log = logging.getLogger('vit_jax')
PyTree = Any
_PREFIX = re.compile(r'(params|opt/target)/')  # prefix of big_vision's names
# Image size (pixels) of models whose arrays do not determine it: BiT, and
# Vision Transformers without learned positions.
_DEFAULT_SIZE = 224
_COMPUTED = {'gelu': 'tanh', 'norm_eps': EPSILON}


def matches(path: str) -> bool:
  """Returns whether a path has the ending of the format."""
  return path.endswith('.npz')


def load(path: str) -> Pretrained:
  """Describes the weights in a file.

  Args:
    path: path of the file, local or gs://.

  Raises:
    UserError: the file cannot be read, or its arrays are not those of a
      supported model.
  """
  arrays = npz_resnet.flattened(_weights(path, npz_arrays.read(path)))
  bit = npz_resnet.BIT_ROOT in arrays
  described = _bit(path, arrays) if bit else _vit(path, arrays)
  unseen = npz_notes.read(path) or Unseen("the authors' JAX code", gelu='tanh')
  source = foreign.pretrained(path, described, unseen)
  # With this key, users could override mean and std. These weights are known to
  # expect pixels in [-1, 1].
  about = {k: v for k, v in source.about.items() if k != 'normalization'}
  return dataclasses.replace(source, about=about)


def _weights(
  path: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the weights in a file, with the prefix removed from their names."""
  prefixed = [name for name in arrays if _PREFIX.match(name)]
  if not prefixed:
    return dict(arrays)
  others = sorted({n.partition('/')[0] for n in arrays if n not in prefixed})
  if others:
    log.info('%s: left out %s', path, ', '.join(others))
  return {_PREFIX.sub('', name, count=1): arrays[name] for name in prefixed}


def _bit(path: str, arrays: dict[str, np.ndarray]) -> Described:
  """Describes a BiT ResNet."""
  section = npz_resnet.section(path, arrays, npz_resnet.BIT_ROOT)
  naming = npz_resnet.bit_naming(section['depths'])
  size = _DEFAULT_SIZE, _DEFAULT_SIZE
  return Described(
    arrays, naming, section, size, _COMPUTED, position_resize='aligned'
  )


def _vit(path: str, arrays: dict[str, np.ndarray]) -> Described:
  """Describes a Vision Transformer, with or without a ResNet as its stem."""
  keys, names = npz_vit.described(path, arrays)
  side = keys['patch_size']
  if npz_resnet.ROOT in arrays:
    keys['stem'] = npz_resnet.section(path, arrays, npz_resnet.ROOT)
    names |= npz_resnet.stem_names(keys['stem']['depths'])
    side *= stride_of(keys['stem']['depths'])  # in pixels of the image
  arrays, slots = _with_positions(path, arrays, keys)
  rows, columns = (
    positions.square_grid(slots) if slots else (_DEFAULT_SIZE // side,) * 2
  )
  naming, size = Naming(names, torch=False), (rows * side, columns * side)
  return Described(
    arrays, naming, keys, size, _COMPUTED, position_resize='aligned'
  )


def _with_positions(
  path: str, arrays: dict[str, np.ndarray], keys: dict[str, Any]
) -> tuple[dict[str, np.ndarray], int]:
  """Returns the arrays with official positions, and the number of patches.

  In big_vision, the class token has no position; here, its position is zeros.
  For files without positions, the number is 0, and `keys['position']` is set.
  """
  official, other = npz_vit.OFFICIAL_POSITION, npz_vit.POSITION
  prefix = int(keys['pool'] == 'token')
  if official in arrays:
    shape = foreign.shape(path, arrays, official, 3, npz_vit.KIND)
    return arrays, shape[1] - prefix
  if other not in arrays:
    keys['position'] = 'sincos2d'
    return arrays, 0
  shape = foreign.shape(path, arrays, other, 3, npz_vit.KIND)
  table = np.pad(arrays.pop(other), ((0, 0), (prefix, 0), (0, 0)))
  return arrays | {official: table}, shape[1]


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes parameters with the official names, and notes next to the file.

  Args:
    path: path of the .npz file, local or gs://.
    params: parameters of the objective that `about` specifies. The model is a
      ViT (`map` pooling has no official name), a hybrid or a ResNet.
    about: description of the weights, see `Pretrained.about`; with {}, `params`
      are those of the model, and no notes are written.

  Raises:
    UserError: a parameter has no official name, or a file cannot be written.
  """
  model = None
  if 'model' in about:
    source = Pretrained(path, about, lambda abstract: None)
    model = source.model()
    _check_positions(model)
    foreign.warn_of_defaults(path, model)
    params = source.backbone(params)
  flat = {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  if model is not None:
    flat = normalization.symmetric(flat, model.normalization)
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
  names = npz_vit.names(npz_vit.NUMBERED_BLOCK, npz_vit.ORIGINAL)
  depths = npz_resnet.stacked_depths(flat, 'stem/')
  names |= npz_resnet.stem_names(depths)
  return Naming(names, torch=False)


def _check_positions(model: Any) -> None:
  """Checks that all tokens of a ViT have learned positions.

  Raises:
    UserError: some tokens do not.
  """
  foreign.check_positions(model, ('learned',))
  if not getattr(model, 'prefix_positions', True):
    raise UserError(
      'official .npz files have a position for the class token, but this model '
      'has none: write a directory, or big_vision:FILE.npz.'
    )
