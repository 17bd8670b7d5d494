"""Weights of big_vision's plain ViTs: `.npz` under its own names.

The arrays are those of the official files (`npz`), with these differences: a
prefix `params/`; the position embedding at the root, added before the class
token is prepended, or none (sincos2d); scanned layers, which are stacked;
attention pooling; bfloat16. Files whose names begin with `opt/target/` contain
the official names. Other arrays that a training stored are left out.
"""

import logging
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.arrays import tree
from vit_jax.files import paths
from vit_jax.models.layers import positions
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  foreign,
  npz,
  npz_arrays,
  npz_notes,
  npz_vit,
)
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming

log = logging.getLogger('vit_jax')
PyTree = Any
_PREFIX = re.compile(r'(params|opt/target)/')
_POSITION = 'pos_embedding'
_PROBE = 'MAPHead_0/probe'
_SCANNED = f'{npz_vit.BLOCK}/LayerNorm_0/scale'
_MAP = {
  'map/probe': _PROBE,
  'map/norm': 'MAPHead_0/LayerNorm_0',
  'map/mlp/fc1': 'MAPHead_0/MlpBlock_0/Dense_0',
  'map/mlp/fc2': 'MAPHead_0/MlpBlock_0/Dense_1',
  **{
    f'map/attention/{part}': f'MAPHead_0/MultiHeadDotProductAttention_0/{part}'
    for part in ('query', 'key', 'value', 'out')
  },
}
# Weights without a position embedding do not show an image size.
_DEFAULT_SIZE = 224


def naming(block: str, numbering: npz_vit.Numbering = npz_vit.LATER) -> Naming:
  """Returns the names of a plain ViT.

  Args:
    block: name of a layer, with `{i}`, or of all layers, stacked.
    numbering: names of a layer's second norm, attention and MLP.
  """
  names = npz_vit.names(block, numbering, _POSITION)
  return Naming(names | _MAP, torch=False)


def matches(path: str) -> bool:
  """Returns whether a path is an .npz file that contains big_vision's names."""
  if not path.endswith('.npz'):
    return False
  try:
    with (
      paths.locate(path).open('rb') as file,
      zipfile.ZipFile(file) as archive,
    ):
      names = [name.removesuffix('.npy') for name in archive.namelist()]
  except (OSError, ValueError, zipfile.BadZipFile):
    return False  # the format `npz` reports what is wrong
  if not any(npz_vit.BLOCK in name for name in names):
    return False
  prefixed = any(_PREFIX.match(name) for name in names)
  positionless = npz_vit.OFFICIAL_POSITION not in names
  own = any(name in names for name in (_POSITION, _PROBE, _SCANNED))
  return prefixed or positionless or own


def load(path: str) -> Pretrained:
  """Describes the weights in a file.

  Args:
    path: path of the file, local or gs://.

  Raises:
    UserError: the file is unreadable, or its arrays are not a plain ViT's.
  """
  arrays = _own(path, npz_arrays.read(path))
  numbering = npz_vit.numbering(arrays)
  scanned = _SCANNED in arrays
  block = npz_vit.BLOCK if scanned else npz_vit.NUMBERED_BLOCK
  keys = npz_vit.keys(path, arrays, numbering)
  keys['pool'] = _pool(arrays)
  arrays, grid = _with_positions(arrays, keys)
  size = grid[0] * keys['patch_size'], grid[1] * keys['patch_size']
  found = Described(arrays, naming(block, numbering), keys, size)
  return npz.pretrained(path, found, "big_vision's defaults")


def _own(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the weights without their prefix."""
  prefixed = [name for name in arrays if _PREFIX.match(name)]
  if not prefixed:
    return dict(arrays)
  others = sorted({n.partition('/')[0] for n in arrays if n not in prefixed})
  if others:
    log.info('%s: left out %s', path, ', '.join(others))
  return {_PREFIX.sub('', name, count=1): arrays[name] for name in prefixed}


def _pool(arrays: Mapping[str, np.ndarray]) -> str:
  """Returns the kind of pooling."""
  if 'cls' in arrays:
    return 'token'
  return 'map' if _PROBE in arrays else 'gap'


def _with_positions(
  arrays: dict[str, np.ndarray],
  keys: dict[str, Any],
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
  """Returns the arrays with one position embedding, and the grid of patches."""
  extra = int(keys['pool'] == 'token')
  if npz_vit.OFFICIAL_POSITION in arrays:
    table = arrays.pop(npz_vit.OFFICIAL_POSITION)
    grid = positions.square_grid(table.shape[1] - extra)
    return arrays | {_POSITION: table}, grid
  if _POSITION not in arrays:
    side = _DEFAULT_SIZE // keys['patch_size']
    keys['position'] = 'sincos2d'
    return arrays, (side, side)
  table = arrays[_POSITION]
  grid = positions.square_grid(table.shape[1])
  if extra:  # positions are added before the class token is prepended
    first = np.zeros((1, 1, table.shape[2]), table.dtype)
    table = np.concatenate([first, table], axis=1)
  return arrays | {_POSITION: table}, grid


def _slots(model: Any) -> bool:
  """Returns whether tokens before those of patches have learned positions."""
  learned = getattr(model, 'position', 'learned') == 'learned'
  return learned and getattr(model, 'prefix_positions', True)


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a file with the prefix `params/` and unstacked layers.

  Args:
    path: path of the file, local or gs://.
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`.

  Raises:
    UserError: big_vision has no names for them, or they cannot be written.
  """
  source = Pretrained('', about, lambda abstract: None)
  flat = tree.flatten(source.backbone(params))
  arrays = {name: np.asarray(leaf) for name, leaf in flat.items()}
  model = source.model()
  foreign.check_positions(model, ('learned', 'sincos2d'))
  foreign.warn_of_defaults(path, model)
  if model.pool == 'token' and _slots(model):
    # There the class token has no position: it becomes a part of the token.
    table = arrays['position/embedding']
    arrays['cls'] = arrays['cls'] + table[:, :1]
    arrays['position/embedding'] = table[:, 1:]
  names = naming(npz_vit.NUMBERED_BLOCK)
  named = {f'params/{k}': v for k, v in naming_lib.export(arrays, names)}
  npz_arrays.write(path, named)
  npz_notes.write(path, model, about)
