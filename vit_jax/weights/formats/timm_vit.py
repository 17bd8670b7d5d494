"""Vision Transformers under the names of timm.

The repositories of DeiT, MAE and DINO use these names too, or older ones.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.layers.norm import EPSILON
from vit_jax.models.vit import sizes as sizes_lib
from vit_jax.weights.formats import foreign
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming, Part

log = logging.getLogger('vit_jax')
_LAYER = 'encoder/layers/'
NAMES: dict[str, str | Part] = {
  'cls': 'cls_token',
  'position/embedding': 'pos_embed',
  'embedding': 'patch_embed.proj',
  **{
    f'{_LAYER}attention/{part}': Part('blocks.{i}.attn.qkv', index, 3)
    for index, part in enumerate(('query', 'key', 'value'))
  },
  f'{_LAYER}attention/out': 'blocks.{i}.attn.proj',
  **{
    _LAYER + here: 'blocks.{i}.' + here.replace('/', '.')
    for here in ('norm1', 'norm2', 'mlp/fc1', 'mlp/fc2')
  },
  **{
    f'{_LAYER}attention/{part}_norm': f'blocks.{{i}}.attn.{part[0]}_norm'
    for part in ('query', 'key')
  },
  f'{_LAYER}scale1': 'blocks.{i}.ls1.gamma',
  f'{_LAYER}scale2': 'blocks.{i}.ls2.gamma',
  'distillation': 'dist_token',
  'registers': 'reg_token',
  'head_distillation': 'head_dist',
  'pre_norm': 'norm_pre',
  'encoder/norm': 'norm',
  'fc_norm': 'fc_norm',
  'map/probe': 'attn_pool.latent',
  'map/attention/query': 'attn_pool.q',
  'map/attention/key': Part('attn_pool.kv', 0, 2),
  'map/attention/value': Part('attn_pool.kv', 1, 2),
  'map/attention/out': 'attn_pool.proj',
  'map/norm': 'attn_pool.norm',
  'map/mlp/fc1': 'attn_pool.mlp.fc1',
  'map/mlp/fc2': 'attn_pool.mlp.fc2',
  'head': 'head',
}
NAMING = Naming(NAMES, torch=True)
# Heads have 64 channels, except where a width says otherwise.
_NUM_HEADS = {
  size['width']: size['num_heads'] for size in sizes_lib.SIZES.values()
} | {1152: 16}  # SigLIP's So400m
_LAYER_SCALE = 1e-4  # a start value, which weights do not need
_CLIP_EPSILON = 1e-5  # PyTorch's default
_PATCH_BIAS = 'patch_embed.proj.bias'
_POOLS = {'token': 'token', 'avg': 'gap', 'map': 'map'}
# Names of the repositories that timm's were made of.
ALIASES = (
  (r'(module\.|backbone\.)+', ''),
  (r'(blocks\.\d+\.)gamma_([12])$', r'\1ls\2.gamma'),
  (r'register_tokens$', 'reg_token'),
  (r'(blocks\.\d+\.mlp\.)w12\.', r'\1fc1.'),
  (r'(blocks\.\d+\.mlp\.)w3\.', r'\1fc2.'),
)
# What an encoder has no use for.
LEFT_OUT = {
  "a decoder and its mask token (MAE's)": r'decoder_|mask_token',
  "a projection head (DINO's)": r'(\w+_)?head\.(mlp|last_layer)\b',
}


def describe(
  path: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Described:
  """What a file's arrays and the config beside it tell of the model.

  Raises:
    UserError: they are no Vision Transformer's, or contradict each other.
  """
  arrays = renamed(path, arrays)
  if 'norm_pre.weight' in arrays:  # CLIP's patch embedding has no bias
    width = arrays['norm_pre.weight'].shape
    arrays.setdefault(_PATCH_BIAS, np.zeros(width, np.float32))
  keys = _keys(path, arrays)
  _check_pool(path, 'gap' if 'fc_norm' in keys else keys['pool'], config)
  keys['num_heads'] = config.get('model_args', {}).get(
    'num_heads', _num_heads(keys['width'], arrays)
  )
  arrays, image_size = _with_positions(path, arrays, keys, config)
  epsilon = _CLIP_EPSILON if keys.get('pre_norm') else EPSILON
  return Described(arrays, NAMING, keys, image_size, epsilon=epsilon)


def naming(model: Any) -> Naming:
  """How the parameters of a model are called there."""
  del model
  return NAMING


def completed(
  model: Any, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """A model's arrays as timm's own has them.

  A bias before CLIP's first norm that is zero but for rounding is left out.
  """
  if model.pre_norm and np.abs(arrays[_PATCH_BIAS]).max() < 1e-6:
    del arrays[_PATCH_BIAS]
  return arrays


def unshown(model: Any) -> dict[str, Any]:
  """What no array shows of a model's sizes."""
  return {'num_heads': model.num_heads}


def renamed(
  path: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Arrays under timm's names, without what an encoder has no use for."""
  found, left_out = {}, dict.fromkeys(LEFT_OUT, 0)
  for name, array in arrays.items():
    for pattern, replacement in ALIASES:
      name = re.sub(f'^{pattern}', replacement, name)
    for what, pattern in LEFT_OUT.items():
      if re.match(pattern, name):
        left_out[what] += 1
        break
    else:
      found[name] = array
  for what, count in left_out.items():
    if count:
      log.info('%s: left out %s, %d arrays', path, what, count)
  return found


def _keys(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """What the arrays tell of the model, but for positions and heads."""

  def shape(name: str, rank: int) -> tuple[int, ...]:
    found = arrays[name].shape if name in arrays else None
    if found is None or len(found) != rank or 0 in found:
      what = 'no such array' if found is None else f'the shape {list(found)}'
      raise UserError(
        f"{path} holds no Vision Transformer under timm's names: {name} must "
        f'have {rank} dimensions, and there is {what}; it has '
        f'{", ".join(sorted(arrays)[:3])} …'
      )
    return found

  width, _, patch_size, _ = shape('patch_embed.proj.weight', 4)
  shape('pos_embed', 3)
  layers = [re.match(r'blocks\.(\d+)\.', name) for name in arrays]
  units = shape('blocks.0.mlp.fc1.weight', 2)[0]
  mlp_dim = shape('blocks.0.mlp.fc2.weight', 2)[1]
  keys: dict[str, Any] = dict(
    patch_size=patch_size,
    width=width,
    depth=max((int(found[1]) + 1 for found in layers if found), default=0),
    mlp_dim=mlp_dim,
    pool='token' if 'cls_token' in arrays else 'gap',
  )
  if 'attn_pool.latent' in arrays:
    keys['pool'] = 'map'
  if units == 2 * mlp_dim:
    keys['gated'] = True
  if 'reg_token' in arrays:
    keys['registers'] = shape('reg_token', 3)[1]
  if 'dist_token' in arrays:
    keys['distilled'] = True
  if 'blocks.0.ls1.gamma' in arrays:
    keys['layer_scale'] = _LAYER_SCALE
  if 'blocks.0.attn.q_norm.weight' in arrays:
    keys['qk_norm'] = True
  if 'norm_pre.weight' in arrays:
    keys['pre_norm'] = True
  if 'fc_norm.weight' in arrays:  # in place of `norm`
    keys['fc_norm'] = True
  return keys


def _with_positions(
  path: str,
  arrays: dict[str, np.ndarray],
  keys: dict[str, Any],
  config: Mapping[str, Any],
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
  """Which tokens have positions, and (height, width) of images, pixels.

  All, patches alone, or (in DINOv2's repository) those and the class token,
  whose position is then part of itself.

  Raises:
    UserError: the number of positions is none of these for a square of patches,
      nor for the images of the config.
  """
  slots, patch_size = arrays['pos_embed'].shape[1], keys['patch_size']
  cls, registers = int('cls_token' in arrays), keys.get('registers', 0)
  prefix = cls + keys.get('distilled', 0) + registers
  size = config.get('pretrained_cfg', {}).get('input_size', (3, 0, 0))[1:]
  said = (size[0] // patch_size, size[1] // patch_size)
  for without in dict.fromkeys((prefix, 0, cls)):
    side = math.isqrt(max(slots - without, 0))
    grid = said if math.prod(said) == slots - without else (side, side)
    if side and math.prod(grid) == slots - without:
      break
  else:
    raise UserError(
      f'{path}: {slots} positions are no square of patches, with or without '
      f'{prefix} other tokens; other grids need the input_size in the '
      'config.json beside it.'
    )
  if without != prefix:
    keys['prefix_positions'] = False
    if without:
      names = 'cls_token', 'pos_embed'
      arrays = foreign.without_class_position(arrays, *names)
  return arrays, (grid[0] * patch_size, grid[1] * patch_size)


def _check_pool(path: str, pool: str, config: Mapping[str, Any]) -> None:
  """Raises UserError where the config pools otherwise than arrays tell."""
  said = config.get('model_args', {}).get('global_pool')
  said = said or config.get('global_pool')
  if said and _POOLS.get(said) != pool:
    raise UserError(
      f'the config.json beside {path} pools by {said!r}, and its arrays are '
      f'those of the pooling {pool!r}: the model vit cannot be both.'
    )


def _num_heads(width: int, arrays: Mapping[str, np.ndarray]) -> int:
  norm = arrays.get('blocks.0.attn.q_norm.weight')
  if norm is not None:  # of the channels of a head
    return width // max(norm.size, 1)
  return _NUM_HEADS.get(width, max(width // 64, 1))
