"""Names of Vision Transformers in the `.npz` files of Google's JAX projects.

The official files and those of big_vision differ in the position embedding: in
files of big_vision, its name has no prefix and it is added before the class
token is prepended, or there is none (sincos2d). Only big_vision has attention
pooling, and scanned layers, whose arrays are stacked.

There are two numberings of submodules in Flax: the original one (LayerNorm_0
and _2, MultiHeadDotProductAttention_1, MlpBlock_3) and the later one, which
counts each kind separately (LayerNorm_0 and _1, MultiHeadDotProductAttention_0,
MlpBlock_0).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.weights.formats import foreign

KIND = 'a plain Vision Transformer'
BLOCK = 'Transformer/encoderblock'
NUMBERED_BLOCK = f'{BLOCK}_{{i}}'
OFFICIAL_POSITION = 'Transformer/posembed_input/pos_embedding'
POSITION = 'pos_embedding'  # in big_vision's files
_PROBE = 'MAPHead_0/probe'


class Numbering(NamedTuple):
  """Names of the submodules of a layer that depend on the numbering."""

  norm: str
  attention: str
  mlp: str


LATER = Numbering('LayerNorm_1', 'MultiHeadDotProductAttention_0', 'MlpBlock_0')
ORIGINAL = Numbering(
  'LayerNorm_2', 'MultiHeadDotProductAttention_1', 'MlpBlock_3'
)


def names(
  block: str, numbering: Numbering, position: str = OFFICIAL_POSITION
) -> dict[str, str]:
  """Returns the names of a plain Vision Transformer's modules.

  Args:
    block: name of a layer, which contains `{i}`, or name of the stacked layers.
    numbering: names of a layer's second norm, its attention and its MLP.
    position: name of the position embedding.
  """
  layer = {
    'norm1': 'LayerNorm_0',
    'norm2': numbering.norm,
    **_attention_and_mlp(numbering),
  }
  return {
    'cls': 'cls',
    'position/embedding': position,
    'embedding': 'embedding',
    'encoder/norm': 'Transformer/encoder_norm',
    'pre_logits': 'pre_logits',
    'head': 'head',
    **{f'encoder/layers/{k}': f'{block}/{v}' for k, v in layer.items()},
  }


def _attention_and_mlp(numbering: Numbering) -> dict[str, str]:
  return {
    'mlp/fc1': f'{numbering.mlp}/Dense_0',
    'mlp/fc2': f'{numbering.mlp}/Dense_1',
    **{
      f'attention/{part}': f'{numbering.attention}/{part}'
      for part in ('query', 'key', 'value', 'out')
    },
  }


POOLING = {
  'map/probe': _PROBE,
  'map/norm': 'MAPHead_0/LayerNorm_0',
  **{
    f'map/{k}': f'MAPHead_0/{v}' for k, v in _attention_and_mlp(LATER).items()
  },
}


def described(
  path: str, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, str]]:
  """Derives the keys of the `model` section and the names from the arrays.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.

  Raises:
    UserError: an array that determines a size is missing or has another rank.
  """
  original = any(f'/{ORIGINAL.attention}/' in name for name in arrays)
  numbering = ORIGINAL if original else LATER
  stacked = f'{BLOCK}/LayerNorm_0/scale' in arrays
  first = BLOCK if stacked else f'{BLOCK}_0'

  def shape(name: str, rank: int) -> tuple[int, ...]:
    return foreign.shape(path, arrays, name, rank, KIND)

  kernel = shape('embedding/kernel', 4)
  mlp = shape(f'{first}/{numbering.mlp}/Dense_0/bias', 1 + stacked)
  query = shape(f'{first}/{numbering.attention}/query/kernel', 3 + stacked)
  pool = 'map' if _PROBE in arrays else 'gap'
  keys = dict(
    patch_size=kernel[0],
    width=kernel[-1],
    depth=mlp[0] if stacked else _depth(arrays),
    mlp_dim=mlp[-1],
    num_heads=query[-2],
    pre_logits='pre_logits/kernel' in arrays,
    pool='token' if 'cls' in arrays else pool,
  )
  block = BLOCK if stacked else NUMBERED_BLOCK
  return keys, names(block, numbering) | POOLING


def _depth(names: Iterable[str]) -> int:
  """Returns the number of layers, according to the numbers in the names."""
  matches = (re.match(rf'{BLOCK}_(\d+)/', name) for name in names)
  return max((int(match[1]) + 1 for match in matches if match), default=0)
