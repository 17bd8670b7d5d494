"""Weights of big_vision's plain ViTs: `.npz` under its own names.

Arrays are those of the official files (`npz`), with these differences: a prefix
`params/`; the position embedding at the root, added before the class token is
prepended, or none (sincos2d); layers that were scanned are stacked; attention
pooling; bfloat16. Files with `opt/target/` before their names carry the
official ones. What else a training kept beside its weights is left out.
"""

import logging
import re
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.layers import positions
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import foreign, npz_arrays
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.foreign import Described, Unseen
from vit_jax.weights.formats.naming import Naming

log = logging.getLogger('vit_jax')
PyTree = Any
_PREFIX = re.compile(r'(params|opt/target)/')
_POSITION = 'pos_embedding'
_OFFICIAL_POSITION = f'Transformer/posembed_input/{_POSITION}'
_BLOCK = 'Transformer/encoderblock'
_ATTENTION = 'MultiHeadDotProductAttention_0'
_MAP = {
  'map/probe': 'MAPHead_0/probe',
  'map/norm': 'MAPHead_0/LayerNorm_0',
  'map/mlp/fc1': 'MAPHead_0/MlpBlock_0/Dense_0',
  'map/mlp/fc2': 'MAPHead_0/MlpBlock_0/Dense_1',
  **{
    f'map/attention/{part}': f'MAPHead_0/{_ATTENTION}/{part}'
    for part in ('query', 'key', 'value', 'out')
  },
}
_LATER = ('LayerNorm_1', _ATTENTION, 'MlpBlock_0')
_ORIGINAL = ('LayerNorm_2', 'MultiHeadDotProductAttention_1', 'MlpBlock_3')
# Weights without a position embedding do not show a size.
_DEFAULT_SIZE = 224


def naming(block: str, numbering: tuple[str, str, str] = _LATER) -> Naming:
  """The names of a plain ViT.

  Args:
    block: of a layer, with `{i}`, or of all, stacked.
    numbering: of a layer's second norm, attention and MLP.
  """
  norm, attention, mlp = numbering
  layers = {
    'norm1': 'LayerNorm_0',
    'norm2': norm,
    'mlp/fc1': f'{mlp}/Dense_0',
    'mlp/fc2': f'{mlp}/Dense_1',
    **{
      f'attention/{part}': f'{attention}/{part}'
      for part in ('query', 'key', 'value', 'out')
    },
  }
  names = {
    'cls': 'cls',
    'position/embedding': _POSITION,
    'embedding': 'embedding',
    'encoder/norm': 'Transformer/encoder_norm',
    'pre_logits': 'pre_logits',
    'head': 'head',
    **_MAP,
    **{f'encoder/layers/{k}': f'{block}/{v}' for k, v in layers.items()},
  }
  return Naming(names, torch=False)


def matches(path: str) -> bool:
  """An .npz file that is there and whose names are big_vision's."""
  if not path.endswith('.npz'):
    return False
  try:
    with (
      paths.locate(path).open('rb') as file,
      zipfile.ZipFile(file) as archive,
    ):
      names = [name.removesuffix('.npy') for name in archive.namelist()]
  except (OSError, ValueError, zipfile.BadZipFile):
    return False  # the other format says what is wrong
  if not any(_BLOCK in name for name in names):
    return False
  own = (_POSITION, 'MAPHead_0/probe', f'{_BLOCK}/LayerNorm_0/scale')
  prefixed = any(_PREFIX.match(name) for name in names)
  positionless = _OFFICIAL_POSITION not in names
  return prefixed or positionless or any(name in names for name in own)


def load(path: str) -> Pretrained:
  """Looks at a file.

  Raises:
    UserError: unreadable, or not a plain ViT's arrays.
  """
  arrays = _own(path, npz_arrays.read(path))
  block, depth = f'{_BLOCK}_{{i}}', _depth(arrays)
  if f'{_BLOCK}/LayerNorm_0/scale' in arrays:
    block = _BLOCK
    depth = arrays[f'{_BLOCK}/LayerNorm_0/scale'].shape[0]
  original = any(f'/{_ORIGINAL[1]}/' in name for name in arrays)
  table = naming(block, _ORIGINAL if original else _LATER)
  first = block.replace('{i}', '0')
  attention = _ORIGINAL[1] if original else _ATTENTION
  kernel = _shape(path, arrays, 'embedding/kernel')
  heads = _shape(path, arrays, f'{first}/{attention}/query/bias')
  mlp = (_ORIGINAL if original else _LATER)[2]
  keys: dict[str, Any] = dict(
    patch_size=kernel[0],
    width=kernel[-1],
    depth=depth,
    mlp_dim=_shape(path, arrays, f'{first}/{mlp}/Dense_0/bias')[-1],
    num_heads=heads[-2] if len(heads) > 1 else 1,
    pool=_pool(arrays),
    pre_logits='pre_logits/kernel' in arrays,
  )
  arrays, grid = _with_positions(arrays, keys)
  size = grid[0] * keys['patch_size'], grid[1] * keys['patch_size']
  unseen = Unseen("big_vision's defaults", gelu='tanh')
  return foreign.pretrained(path, Described(arrays, table, keys, size), unseen)


def _own(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The weights without their prefix."""
  prefixed = [name for name in arrays if _PREFIX.match(name)]
  if not prefixed:
    return dict(arrays)
  others = sorted({n.partition('/')[0] for n in arrays if n not in prefixed})
  if others:
    log.info('%s: left out %s', path, ', '.join(others))
  return {_PREFIX.sub('', name, count=1): arrays[name] for name in prefixed}


def _depth(names: Iterable[str]) -> int:
  found = (re.match(rf'{_BLOCK}_(\d+)/', name) for name in names)
  return max((int(match[1]) + 1 for match in found if match), default=0)


def _pool(names: Iterable[str]) -> str:
  if 'cls' in names:
    return 'token'
  return 'map' if 'MAPHead_0/probe' in names else 'gap'


def _shape(
  path: str, arrays: Mapping[str, np.ndarray], name: str
) -> tuple[int, ...]:
  if name not in arrays or not arrays[name].shape:
    raise UserError(
      f"{path} holds no plain Vision Transformer of big_vision's: it lacks "
      f'{name}; it has {", ".join(sorted(arrays)[:3])} …'
    )
  return arrays[name].shape


def _with_positions(
  arrays: dict[str, np.ndarray],
  keys: dict[str, Any],
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
  """The arrays with one embedding for all tokens; the grid of patches."""
  extra = int(keys['pool'] == 'token')
  if _OFFICIAL_POSITION in arrays:
    table = arrays.pop(_OFFICIAL_POSITION)
    grid = positions.square_grid(table.shape[1] - extra)
    return arrays | {_POSITION: table}, grid
  if _POSITION not in arrays:
    side = _DEFAULT_SIZE // keys['patch_size']
    keys['position'] = 'sincos2d'
    return arrays, (side, side)
  table = arrays[_POSITION]
  grid = positions.square_grid(table.shape[1])
  if extra:  # positions are added before the class token comes
    first = np.zeros((1, 1, table.shape[2]), table.dtype)
    table = np.concatenate([first, table], axis=1)
  return arrays | {_POSITION: table}, grid


def _slots(model: Any) -> bool:
  """Whether tokens before those of patches have learned positions."""
  learned = getattr(model, 'position', 'learned') == 'learned'
  return learned and getattr(model, 'prefix_positions', True)


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a file with the prefix `params/`, layers apart.

  Raises:
    UserError: big_vision has no names for them, or it cannot be written.
  """
  source = Pretrained('', about, lambda abstract: None)
  flat = tree.flatten(source.backbone(params))
  arrays = {name: np.asarray(leaf) for name, leaf in flat.items()}
  model = source.model()
  foreign.check_positions(model, ('learned', 'sincos2d'))
  foreign.warn_of_unsaid(path, model)
  if model.pool == 'token' and _slots(model):  # which gets no position there
    table = arrays['position/embedding']
    arrays['cls'] = arrays['cls'] + table[:, :1]
    arrays['position/embedding'] = table[:, 1:]
  table = naming(f'{_BLOCK}_{{i}}')
  named = {f'params/{k}': v for k, v in naming_lib.export(arrays, table)}
  npz_arrays.write(path, named)
