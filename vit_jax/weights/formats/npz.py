"""Official `.npz` weights: Vision Transformers, hybrids, BiT's ResNets.

The names of a plain Vision Transformer (FLAX) are here, those of a hybrid's
stem in `npz_hybrid`, BiT's in `npz_bit`.

Both numberings of sub-modules occur: the original one (LayerNorm_0 and _2,
MultiHeadDotProductAttention_1, MlpBlock_3) and the later one that counts each
kind apart (LayerNorm_0 and _1, …_0, MlpBlock_0). Files are written in the
original one.
"""

import dataclasses
import re
from typing import Any

import jax
import numpy as np

from vit_jax import checkpoint
from vit_jax.arrays import tree
from vit_jax.arrays.host import place
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.layers import positions
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import foreign, npz_bit, npz_hybrid
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
    sizes: patch_size, width, depth, mlp_dim, num_heads, pool, pre_logits, and
      of hybrids stem, as keywords of `models.vit.Model`.
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
  """Reads official weights of a ViT; the sizes follow from the arrays.

  Args:
    path: an .npz file, local or gs://.

  Raises:
    UserError: unreadable, or not a ViT's or a hybrid's names, ranks and floats.
  """
  return _of_vit(path, arrays_lib.read(path))


def _of_vit(path: str, arrays: dict[str, np.ndarray]) -> Weights:
  """See `read`; takes the arrays out of the dict."""
  stem, stem_flat = npz_hybrid.take(path, arrays)
  depth = _depth(path, list(arrays))
  original = f'{_LAYER.format(i=0)}MlpBlock_3/Dense_0/kernel' in arrays
  pool = 'token' if 'cls' in arrays else 'gap'
  pre_logits, head = 'pre_logits/kernel' in arrays, 'head/kernel' in arrays

  def take(native: str, name: str) -> np.ndarray:
    if name not in arrays:
      raise UserError(f'{path} lacks the array {name!r}.')
    rank = next(r for end, r in _RANKS.items() if re.fullmatch(end, native))
    return arrays_lib.floats(path, name, arrays.pop(name), rank)

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
    raise UserError(arrays_lib.no_place(path, arrays, 'a Vision Transformer'))
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
  if stem is not None:
    sizes['stem'] = stem
  slots = flat['position/embedding'].shape[1]
  return Weights(
    sizes=sizes,
    num_classes=flat['head/kernel'].shape[-1] if head else 0,
    num_patches=slots - (pool == 'token'),
    params=tree.unflatten(flat | stem_flat),
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
  return depth


def matches(path: str) -> bool:
  """By the file's ending."""
  return path.endswith('.npz')


def load(path: str) -> Pretrained:
  """Looks at a file.

  Raises:
    UserError: unreadable, or not the names, ranks and floats of a model that
      has official ones.
  """
  arrays = arrays_lib.read(path)
  if npz_bit.holds(arrays):
    return _pretrained(path, *npz_bit.read(path, arrays), npz_bit.IMAGE_SIZE)
  weights = _of_vit(path, arrays)
  model = {'name': 'vit', **weights.sizes}
  rows, columns = positions.square_grid(weights.num_patches)
  side = weights.sizes['patch_size'] * npz_hybrid.stride(model.get('stem'))
  size = rows * side, columns * side
  return _pretrained(path, model, weights.num_classes, weights.params, size)


def _pretrained(
  path: str,
  model: dict[str, Any],
  num_classes: int,
  params: PyTree,
  image_size: tuple[int, int],
) -> Pretrained:
  """Parameters on the host, with what is known about them."""

  def put(abstract: PyTree) -> PyTree:
    wanted = {k: v.shape for k, v in tree.flatten(abstract).items()}
    came = {k: v.shape for k, v in tree.flatten(params).items()}
    checkpoint.check_shapes(path, came, wanted)
    return jax.tree.map(place, params, abstract)

  about = {
    'format': checkpoint.FORMAT,
    'model': {'dtype': 'float32', **model},
    'objective': {'name': 'supervised'},
    'num_classes': num_classes,
    'image_size': list(image_size),
    'preprocess': {},
    'class_names': [f'class {i}' for i in range(num_classes)],
  }
  return Pretrained(path, about, put)


def _check_positions(model: Any) -> None:
  """Raises UserError unless all tokens of a ViT have learned positions."""
  foreign.check_positions(model, ('learned',))
  if not getattr(model, 'prefix_positions', True):
    raise UserError(
      'official .npz files have a position for the class token, and this model '
      'has none: write a directory, or big_vision:FILE.npz.'
    )


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes parameters with the official names.

  Args:
    path: of the .npz file, local or gs://.
    params: of a ViT (`map` pooling has no official name), a hybrid or a ResNet,
      in this package's layout.
    about: not kept: the file has no place for it.

  Raises:
    UserError: the parameters have no official name, or it cannot be written.
  """
  if 'model' in about:
    model = Pretrained(path, about, lambda abstract: None).model()
    _check_positions(model)
    foreign.warn_of_unsaid(path, model)
  flat = {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  names = npz_bit if npz_bit.fits(flat) else npz_hybrid
  arrays = names.give(flat)
  arrays |= {} if names is npz_bit else _given(flat)
  if flat:
    raise UserError(
      f'{", ".join(list(flat)[:5])}: no official .npz name; only ViTs with '
      'token or gap pooling, hybrids and BiT ResNets can be written so. Export '
      'a directory instead.'
    )
  try:
    with paths.locate(path).open('wb') as file:
      np.savez(file, allow_pickle=False, **arrays)
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error


def _given(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Takes a ViT's leaves out of a flat tree; {official name: array}."""
  pool = 'token' if 'cls' in flat else 'gap'
  outer = _outer_names(pool, 'pre_logits/kernel' in flat, 'head/kernel' in flat)
  layers = {
    f'encoder/layers/{k}': v for k, v in _layer_names(_ORIGINAL).items()
  }
  arrays = {
    official: flat.pop(native)
    for native, official in outer.items()
    if native in flat
  }
  for native, official in layers.items():
    for i, array in enumerate(flat.pop(native, ())):
      arrays[_LAYER.format(i=i) + official] = array
  return arrays
