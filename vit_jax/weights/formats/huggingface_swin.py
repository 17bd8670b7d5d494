"""Swin Transformers in Hugging Face's directories.

In memory the newer majors of the library have other names than in files: both
are read; written is what is in files.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.swin import relative, sizes
from vit_jax.weights.formats import huggingface_processor as processor
from vit_jax.weights.formats import timm_swin
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming

CLASSES = {'swin': 'Swin'}
_DERIVED = r'.*\.relative_position_index'
# (in memory, in files)
_ALIASES = (
  (r'^swin\.', ''),
  (r'\.attention\.([qkv])_proj\.', r'.attention.self.\1.'),
  (r'\.self\.q\.', '.self.query.'),
  (r'\.self\.k\.', '.self.key.'),
  (r'\.self\.v\.', '.self.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
  (r'\.attention\.relative_position_bias\.', '.attention.self.'),
  (r'\.mlp\.fc1\.', '.intermediate.dense.'),
  (r'\.mlp\.fc2\.', '.output.dense.'),
)
_BLOCK = {
  'norm1': 'layernorm_before',
  'norm2': 'layernorm_after',
  **{
    f'attention/{part}': f'attention.self.{part}'
    for part in ('query', 'key', 'value')
  },
  'attention/bias_table': 'attention.self.relative_position_bias_table',
  'attention/out': 'attention.output.dense',
  'mlp/fc1': 'intermediate.dense',
  'mlp/fc2': 'output.dense',
}
# What the model computes by: what else a config says is refused.
_FIXED = {
  'patch_size': sizes.PATCH_SIZE,
  'mlp_ratio': float(sizes.MLP_RATIO),
  'qkv_bias': True,
  'use_absolute_embeddings': False,
}


def describe(
  path: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Described:
  """What a directory's arrays and config tell of the model.

  Raises:
    UserError: the config lacks a size, or describes what no Swin here can be.
  """
  needed = ('embed_dim', 'depths', 'num_heads', 'window_size', 'image_size')
  lacking = [name for name in needed if name not in config]
  if lacking:
    raise UserError(f'config.json of {path} lacks {", ".join(lacking)}.')
  heads = list(config['num_heads'])
  doubled = [heads[0] * 2**i for i in range(len(heads))]
  other = {k: v for k, v in _FIXED.items() if config.get(k, v) != v}
  other |= {} if heads == doubled else {'num_heads': doubled}
  if other:
    raise UserError(
      f'{path} holds a Swin with '
      + ', '.join(f'{key} {config[key]}' for key in other)
      + '; the model swin has '
      + ', '.join(f'{key} {value}' for key, value in other.items())
      + '.'
    )
  keys = dict(
    name='swin',
    width=config['embed_dim'],
    depths=tuple(config['depths']),
    num_heads=heads[0],
    window_size=config['window_size'],
  )
  renamed = {}
  for name, array in arrays.items():
    for pattern, replacement in _ALIASES:
      name = re.sub(pattern, replacement, name)
    if not re.fullmatch(_DERIVED, name):
      renamed[name] = array
  size = processor.pair(config['image_size'])
  found = _naming(len(keys['depths']))
  return Described(renamed, found, keys, size, timm_swin.COMPUTED)


def kind(model: Any) -> str:
  """The library's type of a model."""
  del model
  return 'swin'


def naming(model: Any) -> Naming:
  """How the parameters of a model are called in files."""
  return _naming(len(model.depths))


def _naming(stages: int) -> Naming:
  names = {
    'embedding': 'embeddings.patch_embeddings.projection',
    'embedding_norm': 'embeddings.norm',
    'norm': 'layernorm',
    'head': 'classifier',
  }
  for i in range(stages):
    stage = f'encoder.layers.{i}'
    if i + 1 < stages:
      names[f'merge{i + 1}'] = f'{stage}.downsample.reduction'
      names[f'merge{i + 1}/norm'] = f'{stage}.downsample.norm'
    names |= timm_swin.blocks(
      i, 'encoder.layers.{stage}.blocks.{number}.', _BLOCK
    )
  return Naming(names, torch=True)


def completed(
  model: Any, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """The arrays, which are all that files have.

  Raises:
    UserError: windows are smaller than the config says, in stages whose maps
      are: the library's tables have one size.
  """
  for name, array in arrays.items():
    if name.endswith('relative_position_bias_table'):
      window = relative.window_of(len(array))
      if window != model.window_size:
        raise UserError(
          f"Hugging Face's Swin has windows of {model.window_size} tokens in "
          f'all stages, and this model {window} in {name}: it cannot be '
          "written as such a directory; timm's .safetensors may do."
        )
  return arrays


def written(model: Any) -> dict[str, Any]:
  """The sizes and options in a config.json."""
  return _FIXED | dict(
    embed_dim=model.width,
    depths=list(model.depths),
    num_heads=[model.num_heads * 2**i for i in range(len(model.depths))],
    window_size=model.window_size,
    hidden_act='gelu',
    layer_norm_eps=model.norm_eps,
    drop_path_rate=model.drop_path,
  )
