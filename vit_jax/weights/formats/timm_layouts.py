"""Converts other names and layouts to those of timm's `VisionTransformer`.

torchvision and open_clip have other names for the same parameters. Swins of
torchvision get the names of the authors' repository, which `formats.swin`
reads. (`timm_parsing` replaces the names of DINOv2's repository,
`huggingface_models` those of transformers' Swin.)

timm stores the same parameters differently in its classes `Eva` and
`VisionTransformer`: joined or separate, with planes of rotations side by side
or half a head apart. The conversions do not change the function of a model.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.weights.formats.timm_models import Architecture
from vit_jax.weights.names import aliases, renamed, shape_of

Arrays = dict[str, np.ndarray]
# {array of a block: arrays that it joins along the first axis}
_JOINED = {
  f'{whole}.{leaf}': tuple(f'{part}.{leaf}' for part in parts)
  for whole, parts in (
    ('attn.qkv', ('attn.q_proj', 'attn.k_proj', 'attn.v_proj')),
    ('mlp.fc1', ('mlp.fc1_g', 'mlp.fc1_x')),
  )
  for leaf in ('weight', 'bias')
}
_BLOCK = re.compile(r'(layers\.\d+\.)?blocks\.\d+\.')
FREQUENCIES = 'rope.freqs'
_PERIODS = 'rope_embed.periods'  # of DINOv3's repository


def joined(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns arrays with joined matrices, as most models have them.

  Properties of single models are converted, too:

  - Keys and values of several heads in common (Sapiens2) are repeated.
  - A LayerScale of attention only (Sapiens2) gets ones for the MLP.
  - Masked biases (DINOv3's repository) are set to zero, and constants of its
    rotations are left out.

  Args:
    arrays: arrays with timm's names.
  """
  result = {name: arrays[name] for name in arrays if name != _PERIODS}
  blocks = {match[0] for name in arrays if (match := _BLOCK.match(name))}
  for block in blocks:
    _repeat_heads(result, block)
    for whole, parts in _JOINED.items():
      names = [block + part for part in parts]
      if not result.keys() >= {*names}:
        continue
      separate = [result[name] for name in names]
      shapes = {array.shape[1:] for array in separate}
      # Arrays that do not fit stay as they are, and `foreign` reports them.
      if all(array.ndim for array in separate) and len(shapes) == 1:
        result[block + whole] = np.concatenate([result.pop(n) for n in names])
    # Biases that have not been joined, because the keys have none
    for kind in 'qv':
      if f'{block}attn.{kind}_proj.bias' in result:
        bias = result.pop(f'{block}attn.{kind}_proj.bias')
        result[f'{block}attn.{kind}_bias'] = bias
    mask = result.pop(f'{block}attn.qkv.bias_mask', None)
    if mask is not None:
      bias = result[f'{block}attn.qkv.bias']
      result[f'{block}attn.qkv.bias'] = np.where(mask == 0, 0, bias)
    scale = result.get(f'{block}ls1.gamma')
    if scale is not None:
      result.setdefault(f'{block}ls2.gamma', np.ones_like(scale))
  return result


def _repeat_heads(arrays: dict[str, np.ndarray], block: str) -> None:
  """Repeats keys and values for each head, if several heads have the same."""
  query = arrays.get(f'{block}attn.q_proj.weight')
  norm = arrays.get(f'{block}attn.q_norm.weight')  # [channels of a head]
  if query is None or norm is None:
    return
  for kind in 'kv':
    for leaf in ('weight', 'bias'):
      name = f'{block}attn.{kind}_proj.{leaf}'
      if name in arrays:
        array = arrays[name]
        heads = array.reshape(-1, norm.size, *array.shape[1:])
        heads = np.repeat(heads, len(query) // len(array), axis=0)
        arrays[name] = heads.reshape(-1, *array.shape[1:])


def rotations(
  arrays: Mapping[str, np.ndarray], architecture: Architecture | None
) -> dict[str, Any]:
  """Returns the keys of the model's section for rotations; {} for none.

  Args:
    arrays: arrays with timm's names.
    architecture: architecture of the weights, if it is known.
  """
  if architecture is None or architecture.rope == 'none':
    if FREQUENCIES in arrays:
      return dict(rope='mixed')
    if _PERIODS not in arrays:
      return {}
    channels = 4 * arrays[_PERIODS].size  # of a head
    width = len(arrays['patch_embed.proj.weight'])
    return dict(rope='centered', num_heads=width // channels)
  return dict(
    rope=architecture.rope,
    rope_base=architecture.rope_base or None,
    rope_grid=architecture.rope_grid or None,
    rope_offset=architecture.rope_offset,
  )


def planes_apart(
  path: str,
  arrays: Mapping[str, np.ndarray],
  num_heads: int,
  rope: str,
  columns_first: bool,
) -> dict[str, np.ndarray]:
  """Returns arrays in which planes of rotations are half a head apart.

  The channels of queries and keys are permuted alike, so that their products
  do not change: from planes (2i, 2i + 1) to (i, i + c/2), those of rows first.

  Args:
    path: path of the file, for messages.
    arrays: arrays with joined queries, keys and values.
    num_heads: number of heads.
    rope: 'index' or 'mixed'; frequencies of 'mixed' are split into layers.
    columns_first: whether columns come before rows in the arrays.

  Raises:
    UserError: frequencies or matrices are missing.
  """
  result = dict(arrays)
  kind = 'a model with rotations'
  _, width = shape_of(path, arrays, 'blocks.0.attn.qkv.weight', 2, kind)
  channels = width // num_heads  # of a head
  planes = np.arange(channels // 2)
  if rope == 'mixed':
    shape_of(path, arrays, FREQUENCIES, 4, kind)
    frequencies = result.pop(FREQUENCIES)  # [2, depth, h, c/2]
    rows_first = frequencies[::-1] if columns_first else frequencies
    for i, layer in enumerate(rows_first.swapaxes(0, 1)):
      result[f'blocks.{i}.{FREQUENCIES}'] = layer
  elif columns_first:
    planes = np.roll(planes, channels // 4)
  index = np.concatenate([2 * planes, 2 * planes + 1])
  for name, array in result.items():
    if re.search(r'attn\.(qkv\.|q_bias$)', name):
      # [1 or 3, heads, channels, inputs]; biases lack the last axis
      parts = array.reshape(-1, num_heads, channels, *array.shape[1:]).copy()
      parts[:2] = parts[:2, :, index]  # queries and keys, not values
      result[name] = parts.reshape(array.shape)
    elif re.search(r'attn\.[qk]_norm\.', name):
      result[name] = array[index]
  return result


# torchvision and open_clip

_PROJECTION = 'proj'  # of open_clip: [width, outputs]
# Arrays that only files of torchvision's ViTs, its Swins, and open_clip contain
PROJECTS = ('conv_proj.weight', 'features.0.0.weight', 'ln_post.weight')


def with_timm_names(arrays: Mapping[str, np.ndarray]) -> Arrays:
  """Returns the arrays of a model with the names and shapes of timm."""
  result = dict(arrays)
  if any(first in arrays for first in PROJECTS):
    result = renamed(arrays, aliases('torchvision and open_clip'))
    for name in ('cls_token', 'pos_embed'):  # fewer dimensions in open_clip
      if name in result:
        result[name] = np.array(result[name], ndmin=3)
  if _PROJECTION in result:  # open_clip, whose patch embedding has no bias
    width = len(result['patch_embed.proj.weight'])
    result['patch_embed.proj.bias'] = np.zeros(width, np.float32)
    result['head.proj.weight'] = result.pop(_PROJECTION).T
  kernel = result.pop('head.proj.weight', None)  # also of timm's towers
  if kernel is not None:
    bias = np.zeros(len(kernel), np.float32)
    result['head.weight'] = kernel
    result['head.bias'] = result.pop('head.proj.bias', bias)
  return result
