"""Swin Transformers under the names of timm and of the authors' repository.

The two differ in the numbers of what merges patches (timm counts it as the
beginning of a stage, the authors as the end of the one before) and in the
head's name. Both are read; written is what timm has now.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.swin import relative, sizes, stage
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming, Part

# What the model computes by; its config section has no keys for it.
COMPUTED = {'gelu': 'exact', 'norm_eps': stage.LN_EPSILON}
_TABLE = 'layers.0.blocks.0.attn.relative_position_bias_table'
_MASK = 'layers.0.blocks.1.attn_mask'
# What follows from the sizes, and may be in files all the same.
_DERIVED = r'.*\.(relative_position_index|attn_mask)'
_BLOCK: dict[str, str | Part] = {
  **{name: name for name in ('norm1', 'norm2')},
  **{
    f'attention/{part}': Part('attn.qkv', index, 3)
    for index, part in enumerate(('query', 'key', 'value'))
  },
  'attention/bias_table': 'attn.relative_position_bias_table',
  'attention/out': 'attn.proj',
  'mlp/fc1': 'mlp.fc1',
  'mlp/fc2': 'mlp.fc2',
}


def holds(names: Container[str]) -> bool:
  """Whether these are a Swin's arrays, or its parameters."""
  return _TABLE in names or 'stage1/layers/plain/norm1/scale' in names


def naming(model: Any) -> Naming:
  """How the parameters of a model are called by timm."""
  return _naming(len(model.depths))


def _naming(stages: int) -> Naming:
  names: dict[str, str | Part] = {
    'embedding': 'patch_embed.proj',
    'embedding_norm': 'patch_embed.norm',
    'norm': 'norm',
    'head': 'head.fc',
  }
  for i in range(stages):
    if i:
      names[f'merge{i}'] = f'layers.{i}.downsample.reduction'
      names[f'merge{i}/norm'] = f'layers.{i}.downsample.norm'
    names |= blocks(i, 'layers.{stage}.blocks.{number}.', _BLOCK)
  return Naming(names, torch=True)


def blocks(
  stage: int, prefix: str, names: Mapping[str, str | Part]
) -> dict[str, str | Part]:
  """How the blocks of a stage are called; here they are stacked by pairs.

  Args:
    stage: counted from 0.
    prefix: of a block there, with '{stage}' and '{number}'.
    names: {path in a block: name after the prefix}.
  """
  found: dict[str, str | Part] = {}
  for kind, number in (('plain', '{2i}'), ('shifted', '{2i+1}')):
    there = prefix.replace('{stage}', str(stage)).replace('{number}', number)
    for path, name in names.items():
      here = f'stage{stage + 1}/layers/{kind}/{path}'
      if isinstance(name, Part):
        found[here] = name._replace(name=there + name.name)
      else:
        found[here] = there + name
  return found


def completed(
  model: Any, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """A model's arrays, which are all that timm's own has."""
  del model
  return arrays


def unshown(model: Any) -> dict[str, Any]:
  """What no array shows of a model's sizes."""
  return {'window_size': model.window_size}


def describe(
  path: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Described:
  """What a file's arrays and the config beside it tell of the model.

  The size of images is the config's; else what the masks tell, which the
  authors' files hold; else what makes the last map one window, as in all
  published models and in those of smaller images.

  Raises:
    UserError: they are no Swin's.
  """
  every, arrays = arrays, _renamed(arrays)
  keys = _keys(path, arrays)
  # Of images smaller than a window the tables tell too little.
  keys |= {
    key: config['model_args'][key]
    for key in ('window_size',)
    if key in config.get('model_args', {})
  }
  size = config.get('pretrained_cfg', {}).get('input_size', (3, 0, 0))[1:]
  if not any(size):
    last = len(keys['depths']) - 1
    table = arrays.get(
      _TABLE.replace('layers.0', f'layers.{last}'), every[_TABLE]
    )
    side = _window(table) * sizes.PATCH_SIZE * 2**last
    if _MASK in every:
      windows = round(len(every[_MASK]) ** 0.5)
      side = windows * keys['window_size'] * sizes.PATCH_SIZE
    size = side, side
  found = _naming(len(keys['depths']))
  epsilon = stage.LN_EPSILON
  return Described(arrays, found, keys, tuple(size), COMPUTED, epsilon)


def _renamed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Arrays under timm's names, without what follows from the sizes."""
  ends_stages = 'layers.0.downsample.reduction.weight' in arrays
  renamed = {}
  for name, array in arrays.items():
    if re.fullmatch(_DERIVED, name):
      continue
    if ends_stages:
      name = re.sub(r'layers\.(\d+)\.downsample', _next_stage, name)
    renamed[re.sub(r'^head\.(weight|bias)$', r'head.fc.\1', name)] = array
  return renamed


def _next_stage(found: re.Match[str]) -> str:
  return f'layers.{int(found[1]) + 1}.downsample'


def _keys(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Sizes by names and shapes."""
  found = [re.match(r'layers\.(\d+)\.blocks\.(\d+)\.', k) for k in arrays]
  numbers = {(int(each[1]), int(each[2])) for each in found if each}
  stages = 1 + max(stage for stage, _ in numbers)
  depths = tuple(sum(s == stage for s, _ in numbers) for stage in range(stages))
  patches = arrays.get('patch_embed.proj.weight', np.zeros(()))
  square = (3, sizes.PATCH_SIZE, sizes.PATCH_SIZE)
  if patches.shape[1:] != square or any(d < 2 or d % 2 for d in depths):
    raise UserError(
      f'{path} holds no Swin Transformer: it has {list(square)[1:]} patches of '
      '3 channels in patch_embed.proj.weight and an even number of blocks in '
      f'each stage; here patches are {list(patches.shape)} and blocks '
      f'{list(depths)}.'
    )
  table = arrays[_TABLE]
  return dict(
    name='swin',
    width=patches.shape[0],
    depths=depths,
    num_heads=table.shape[-1] if table.ndim else 1,
    window_size=_window(table),
  )


def _window(table: np.ndarray) -> int:
  """Side of the windows that a bias table is for, tokens."""
  return relative.window_of(len(table) if table.ndim else 1)
