"""Official `.npz` weights of plain Vision Transformers (FLAX names).

Both numberings of sub-modules occur: the original one (LayerNorm_0 and _2,
MultiHeadDotProductAttention_1, MlpBlock_3) and the later one that counts each
kind apart (LayerNorm_0 and _1, …_0, MlpBlock_0). Files are written in the
original one.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import checkpoint
from vit_jax.arrays import tree
from vit_jax.arrays.host import place
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.layers import positions
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import npz_arrays as arrays_lib

PyTree = Any
_LAYER = 'Transformer/encoderblock_{i}/'
# (number of: second LayerNorm, attention, MLP) in each numbering
_ORIGINAL, _LATER = (2, 1, 3), (1, 0, 0)
# Dimensions of arrays by the end of their native path; the first that matches.
_RANKS = {
  r'embedding/kernel': 4,
  r'(cls|position/embedding)': 3,
  r'.*attention/(query|key|value|out)/kernel': 3,
  r'.*attention/(query|key|value)/bias': 2,
  r'.*kernel': 2,
  r'.*': 1,  # biases and scales
}


@dataclasses.dataclass(frozen=True)
class Weights:
  """What a file holds.

  Attributes:
    sizes: patch_size, width, depth, mlp_dim, num_heads, pool, pre_logits, as
      keywords of `models.vit.Model`.
    num_classes: outputs of the head, 0 without one.
    num_patches: slots of the position embedding that are patches.
    params: in this package's layout, numpy arrays.
  """

  sizes: dict[str, Any]
  num_classes: int
  num_patches: int
  params: PyTree


def _outer_names(pool: str, pre_logits: bool, head: bool) -> dict[str, str]:
  """{native path: official name} outside the encoder layers."""
  names = {
    'embedding/kernel': 'embedding/kernel',
    'embedding/bias': 'embedding/bias',
    'position/embedding': 'Transformer/posembed_input/pos_embedding',
    'encoder/norm/scale': 'Transformer/encoder_norm/scale',
    'encoder/norm/bias': 'Transformer/encoder_norm/bias',
  }
  if pool == 'token':
    names['cls'] = 'cls'
  for module, present in (('pre_logits', pre_logits), ('head', head)):
    if present:
      for leaf in ('kernel', 'bias'):
        names[f'{module}/{leaf}'] = f'{module}/{leaf}'
  return names


def _layer_names(numbering: tuple[int, int, int]) -> dict[str, str]:
  """{path under encoder/layers/: official name under encoderblock_i/}."""
  norm, attention, mlp = numbering
  modules = {
    'norm1': 'LayerNorm_0',
    'norm2': f'LayerNorm_{norm}',
    'mlp/fc1': f'MlpBlock_{mlp}/Dense_0',
    'mlp/fc2': f'MlpBlock_{mlp}/Dense_1',
  }
  for part in ('query', 'key', 'value', 'out'):
    modules[f'attention/{part}'] = (
      f'MultiHeadDotProductAttention_{attention}/{part}'
    )
  return {
    f'{native}/{leaf}': f'{official}/{leaf}'
    for native, official in modules.items()
    for leaf in (
      ('scale', 'bias') if native.startswith('norm') else ('kernel', 'bias')
    )
  }


def read(path: str) -> Weights:
  """Reads official weights of a plain ViT; the sizes follow from the arrays.

  Args:
    path: an .npz file, local or gs://.

  Raises:
    UserError: unreadable, or not a plain ViT's names, ranks and floats.
  """
  arrays = arrays_lib.read(path)
  depth = _depth(path, list(arrays))
  original = f'{_LAYER.format(i=0)}MlpBlock_3/Dense_0/kernel' in arrays
  pool = 'token' if 'cls' in arrays else 'gap'
  pre_logits, head = 'pre_logits/kernel' in arrays, 'head/kernel' in arrays

  def take(native: str, name: str) -> np.ndarray:
    if name not in arrays:
      raise UserError(f'{path} lacks the array {name!r}.')
    return _float32(path, native, name, arrays.pop(name))

  flat = {
    native: take(native, official)
    for native, official in _outer_names(pool, pre_logits, head).items()
  }
  layer_names = _layer_names(_ORIGINAL if original else _LATER)
  for native, official in layer_names.items():
    per_layer = [
      take(native, _LAYER.format(i=i) + official) for i in range(depth)
    ]
    shapes = {array.shape for array in per_layer}
    if len(shapes) > 1:
      raise UserError(
        f'{path} has layers of different shapes: {official} is {shapes}.'
      )
    flat[f'encoder/layers/{native}'] = np.stack(per_layer)
  if arrays:
    raise UserError(
      f'{path} holds arrays that a plain ViT has no place for: '
      f'{", ".join(sorted(arrays)[:5])}.'
    )
  width, num_heads, _ = flat['encoder/layers/attention/query/kernel'].shape[1:]
  sizes = dict(
    patch_size=flat['embedding/kernel'].shape[0],
    width=width,
    depth=depth,
    mlp_dim=flat['encoder/layers/mlp/fc1/kernel'].shape[-1],
    num_heads=num_heads,
    pool=pool,
    pre_logits=pre_logits,
  )
  slots = flat['position/embedding'].shape[1]
  return Weights(
    sizes=sizes,
    num_classes=flat['head/kernel'].shape[-1] if head else 0,
    num_patches=slots - (pool == 'token'),
    params=tree.unflatten(flat),
  )


def _depth(path: str, names: list[str]) -> int:
  """The number of layers; raises UserError where it is no plain ViT."""
  blocks = [re.match(r'Transformer/encoderblock_(\d+)/', n) for n in names]
  depth = max((int(match[1]) + 1 for match in blocks if match), default=0)
  if depth == 0 or 'embedding/kernel' not in names:
    raise UserError(
      f'{path} holds no plain Vision Transformer: names like '
      'Transformer/encoderblock_0/… and embedding/kernel are missing; it has '
      f'{", ".join(sorted(names)[:3])} …'
    )
  if any(name.startswith('conv_root') for name in names):
    raise UserError(f'{path} holds a hybrid (ResNet + ViT), not a plain ViT.')
  return depth


def _float32(
  path: str, native: str, name: str, array: np.ndarray
) -> np.ndarray:
  """An array as float32, if it can be what its name says."""
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise UserError(
      f'{path}: {name} is of type {array.dtype}; weights are floating-point '
      'numbers.'
    )
  rank = next(r for end, r in _RANKS.items() if re.fullmatch(end, native))
  if array.ndim != rank or 0 in array.shape:
    raise UserError(
      f'{path}: {name} has the shape {array.shape}; it must have {rank} '
      'dimension(s), none of them 0.'
    )
  with np.errstate(over='ignore'):  # to infinity, which is refused later
    return np.asarray(array, np.float32)


def matches(path: str) -> bool:
  """By the file's ending."""
  return path.endswith('.npz')


def load(path: str) -> Pretrained:
  """Looks at a file; see `read`, also for what it raises."""
  weights = read(path)
  rows, columns = positions.square_grid(weights.num_patches)
  patch = weights.sizes['patch_size']

  def put(abstract: PyTree) -> PyTree:
    wanted = {k: v.shape for k, v in tree.flatten(abstract).items()}
    came = {k: v.shape for k, v in tree.flatten(weights.params).items()}
    checkpoint.check_shapes(path, came, wanted)
    return jax.tree.map(place, weights.params, abstract)

  about = {
    'format': checkpoint.FORMAT,
    'model': {'name': 'vit', 'dtype': 'float32', **weights.sizes},
    'objective': {'name': 'supervised'},
    'num_classes': weights.num_classes,
    'image_size': [rows * patch, columns * patch],
    'preprocess': {},
    'class_names': [f'class {i}' for i in range(weights.num_classes)],
  }
  return Pretrained(path, about, put, lambda abstract: None)


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a plain ViT's parameters with the official names.

  Args:
    path: of the .npz file, local or gs://.
    params: in this package's layout (`map` pooling has no official name).
    about: not kept: the file has no place for it.

  Raises:
    UserError: the parameters have no official name, or it cannot be written.
  """
  del about
  flat = {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  pool = 'token' if 'cls' in flat else 'gap'
  outer = _outer_names(pool, 'pre_logits/kernel' in flat, 'head/kernel' in flat)
  layers = {
    f'encoder/layers/{k}': v for k, v in _layer_names(_ORIGINAL).items()
  }
  unknown = [key for key in flat if key not in outer and key not in layers]
  if unknown:
    raise UserError(
      f'{", ".join(unknown[:5])}: no official .npz name; only plain ViTs with '
      'token or gap pooling can be written so. Export a directory instead.'
    )
  arrays = {official: flat[native] for native, official in outer.items()}
  for native, official in layers.items():
    for i, array in enumerate(flat[native]):
      arrays[_LAYER.format(i=i) + official] = array
  try:
    with paths.locate(path).open('wb') as file:
      np.savez(file, allow_pickle=False, **arrays)
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error
