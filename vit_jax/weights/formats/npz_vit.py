"""Names of Vision Transformers in the `.npz` files of Google's JAX projects.

Flax's two numberings of submodules occur: the original one (LayerNorm_0 and _2,
MultiHeadDotProductAttention_1, MlpBlock_3) and the later one that counts each
kind separately (LayerNorm_0 and _1, …_0, MlpBlock_0).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError

BLOCK = 'Transformer/encoderblock'
NUMBERED_BLOCK = f'{BLOCK}_{{i}}'
OFFICIAL_POSITION = 'Transformer/posembed_input/pos_embedding'
_PARTS = ('query', 'key', 'value', 'out')


class Numbering(NamedTuple):
  """Names of the submodules of a layer that depend on the numbering."""

  norm: str
  attention: str
  mlp: str


LATER = Numbering('LayerNorm_1', 'MultiHeadDotProductAttention_0', 'MlpBlock_0')
ORIGINAL = Numbering(
  'LayerNorm_2', 'MultiHeadDotProductAttention_1', 'MlpBlock_3'
)


def numbering(names: Iterable[str]) -> Numbering:
  """Returns the numbering of a file's names."""
  original = any(f'/{ORIGINAL.attention}/' in name for name in names)
  return ORIGINAL if original else LATER


def names(block: str, numbering: Numbering, position: str) -> dict[str, str]:
  """Returns the names of a plain Vision Transformer's modules.

  Args:
    block: name of a layer, with `{i}`, or of all layers, stacked.
    numbering: names of a layer's second norm, its attention and its MLP.
    position: name of the position embedding.
  """
  layers = {
    'norm1': 'LayerNorm_0',
    'norm2': numbering.norm,
    'mlp/fc1': f'{numbering.mlp}/Dense_0',
    'mlp/fc2': f'{numbering.mlp}/Dense_1',
    **{f'attention/{part}': f'{numbering.attention}/{part}' for part in _PARTS},
  }
  return {
    'cls': 'cls',
    'position/embedding': position,
    'embedding': 'embedding',
    'encoder/norm': 'Transformer/encoder_norm',
    'pre_logits': 'pre_logits',
    'head': 'head',
    **{f'encoder/layers/{k}': f'{block}/{v}' for k, v in layers.items()},
  }


def depth(names: Iterable[str]) -> int:
  """Returns the number of layers that are numbered in a file's names."""
  found = (re.match(rf'{BLOCK}_(\d+)/', name) for name in names)
  return max((int(match[1]) + 1 for match in found if match), default=0)


def shape(
  path: str, arrays: Mapping[str, np.ndarray], name: str, rank: int
) -> tuple[int, ...]:
  """Returns the shape of an array that every Vision Transformer has.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.
    name: name of the array.
    rank: number of its dimensions.

  Raises:
    UserError: the array is missing or has another rank.
  """
  found = arrays[name].shape if name in arrays else None
  if found is None or len(found) != rank or 0 in found:
    actual = 'it is missing' if found is None else f'it is {list(found)}'
    raise UserError(
      f'{path} does not hold a plain Vision Transformer: {name} must have '
      f'{rank} dimensions, none of them 0, and {actual}; the file has '
      f'{", ".join(sorted(arrays)[:3])} …'
    )
  return found


def keys(
  path: str,
  arrays: Mapping[str, np.ndarray],
  numbering: Numbering,
) -> dict[str, Any]:
  """Returns the sizes in a `model` section, except for the pooling.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.
    numbering: numbering of its names.

  Raises:
    UserError: an array that shows a size is missing or of another rank.
  """
  stacked = f'{BLOCK}/LayerNorm_0/scale' in arrays
  first = BLOCK if stacked else f'{BLOCK}_0'
  kernel = shape(path, arrays, 'embedding/kernel', 4)
  mlp = f'{first}/{numbering.mlp}/Dense_0/bias'
  query = f'{first}/{numbering.attention}/query/kernel'
  return dict(
    patch_size=kernel[0],
    width=kernel[-1],
    depth=shape(path, arrays, mlp, 2)[0] if stacked else depth(arrays),
    mlp_dim=shape(path, arrays, mlp, 1 + stacked)[-1],
    num_heads=shape(path, arrays, query, 3 + stacked)[-2],
    pre_logits='pre_logits/kernel' in arrays,
  )
