"""Swin Transformers in Hugging Face directories.

Newer major versions of transformers use other names in memory than in files.
Both can be read; written files have the names of files.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import swin
from vit_jax.weights.formats import huggingface_processor as processor
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats import settings, timm_swin
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming

log = logging.getLogger('vit_jax')
CLASSES = {'swin': 'Swin'}
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
_NAMES = {
  'embedding': 'embeddings.patch_embeddings.projection',
  'embedding_norm': 'embeddings.norm',
  'norm': 'layernorm',
  'head': 'classifier',
}
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
# Constants of the model; other values in a config are an error.
_FIXED = {
  'patch_size': swin.PATCH_SIZE,
  'mlp_ratio': float(swin.MLP_RATIO),
  'qkv_bias': True,
  'use_absolute_embeddings': False,
}


RULES: settings.Rules = {
  'embed_dim': settings.integer(1, 2**15),
  'depths': settings.several(settings.integer(1, 1000), 1, 8),
  'num_heads': settings.several(settings.integer(1, 4096), 1, 8),
  'window_size': settings.integer(1, 4096),
  'image_size': processor.SIZE,
}
REQUIRED = tuple(RULES)


def describe(
  path: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Described:
  """Describes the model of a directory.

  Args:
    path: path of the directory, for messages.
    arrays: all arrays in the directory.
    config: content of config.json, validated by `RULES`.

  Raises:
    UserError: the config describes a Swin that is not supported.
  """
  heads = list(config['num_heads'])
  doubled = [heads[0] * 2**i for i in range(len(heads))]
  other = {k: v for k, v in _FIXED.items() if config.get(k, v) != v}
  other |= {} if heads == doubled else {'num_heads': doubled}
  if len(config['depths']) != len(heads):
    raise UserError(
      f'{path}: depths are {config["depths"]} and num_heads {heads}; they must '
      'have one element for each stage.'
    )
  if other:
    raise UserError(
      f'{path} contains a Swin with '
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
  renamed = {
    name: array
    for name, array in naming_lib.renamed(arrays, _ALIASES).items()
    if not name.endswith('.relative_position_index')  # follows from the sizes
  }
  size = processor.pair(config['image_size'])
  names = _naming(len(keys['depths']))
  return Described(renamed, names, keys, size, timm_swin.COMPUTED)


def kind(model: Any) -> str:
  """Returns the `model_type` of a model in transformers."""
  del model
  return 'swin'


def naming(model: Any) -> Naming:
  """Returns the names of a model's parameters in files."""
  return _naming(len(model.depths))


def _naming(stages: int) -> Naming:
  layers = 'encoder.layers.'
  return timm_swin.stacked(_NAMES, _BLOCK, layers, stages, merging_of=-1)


def completed(
  model: Any, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the arrays unchanged, because files contain no others.

  Raises:
    UserError: a stage has smaller windows than the config, because its map is
      small; in transformers, the windows of all stages have the same size.
  """
  for name, array in arrays.items():
    if name.endswith('relative_position_bias_table'):
      window = swin.window_of(len(array))
      if window != model.window_size:
        raise UserError(
          f"Hugging Face's Swin has windows of {model.window_size} tokens in "
          f'all stages, and this model {window} in {name}: it cannot be '
          "written as such a directory; write timm's .safetensors instead."
        )
  if model.window_rule != 'authors':
    log.warning(
      "model.window_rule=%r is not stored: Hugging Face's Swin uses the rule "
      "'authors', with other results at image sizes that windows do not fill",
      model.window_rule,
    )
  return arrays


def written(model: Any) -> dict[str, Any]:
  """Returns the sizes and options of a model for config.json."""
  return _FIXED | dict(
    embed_dim=model.width,
    depths=list(model.depths),
    num_heads=[model.num_heads * 2**i for i in range(len(model.depths))],
    window_size=model.window_size,
    hidden_act='gelu',
    layer_norm_eps=model.norm_eps,
    drop_path_rate=model.drop_path,
  )
