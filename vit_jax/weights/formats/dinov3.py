"""Weights of DINOv3 with Hugging Face's names, the type `dinov3_vit`."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.attention.attention import BIASES
from vit_jax.models.positions import ROTATIONS
from vit_jax.weights import metadata
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import vit
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import NameMap

Arrays = dict[str, np.ndarray]
_LAYER = 'encoder/layers/'
_MASK, _REGISTERS = 'embeddings.mask_token', 'embeddings.register_tokens'
_GATE, _UP = '.mlp.gate_proj.', '.mlp.up_proj.'
NAMES = NameMap(
  {
    'cls': 'embeddings.cls_token',
    'registers': _REGISTERS,
    'embedding': 'embeddings.patch_embeddings',
    f'{_LAYER}attention/query': 'layer.{i}.attention.q_proj',
    f'{_LAYER}attention/key': 'layer.{i}.attention.k_proj',
    f'{_LAYER}attention/value': 'layer.{i}.attention.v_proj',
    f'{_LAYER}attention/out': 'layer.{i}.attention.o_proj',
    f'{_LAYER}norm1': 'layer.{i}.norm1',
    f'{_LAYER}norm2': 'layer.{i}.norm2',
    f'{_LAYER}mlp/fc1': 'layer.{i}.mlp.up_proj',
    f'{_LAYER}mlp/fc2': 'layer.{i}.mlp.down_proj',
    f'{_LAYER}scale1': 'layer.{i}.layer_scale1.lambda1',
    f'{_LAYER}scale2': 'layer.{i}.layer_scale2.lambda1',
    'encoder/norm': 'norm',
    'head': 'classifier',  # which transformers does not have
  }
)
# What `foreign.exported` has to allow
POSITIONS = ('none', 'rope2d')
SUPPORTED = ('rope', 'qkv_bias', 'bias')


def parse(
  path: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> ParsedWeights:
  """Parses a DINOv3.

  Args:
    path: path of the directory, for messages.
    arrays: arrays of the files.
    config: config.json.

  Raises:
    UserError: arrays that every DINOv3 has are missing, or the activation is
      not supported.
  """
  names = [re.sub(r'^model\.', '', name) for name in arrays]
  result = dict(zip(names, arrays.values(), strict=True))
  result.pop(_MASK, None)
  for name in names:
    if _GATE in name:  # the gate comes first in the joined array
      up = name.replace(_GATE, _UP)
      result[up] = np.concatenate([result.pop(name), result[up]])
  if _REGISTERS in result and not result[_REGISTERS].size:
    del result[_REGISTERS]
  model = vit.section(path, result, NAMES, 'a DINOv3')
  activation = config.get('hidden_act')
  if model.get('gated') and activation != 'silu':
    raise UserError(
      f'config.json of {path}: hidden_act is {activation!r}; for gated MLPs, '
      "the model vit supports 'silu'."
    )
  model |= dict(
    num_heads=config['num_attention_heads'], position='none', rope='centered'
  )
  base = float(config.get('rope_theta', ROTATIONS['centered']))
  if base != ROTATIONS['centered']:
    model['rope_base'] = base
  size = metadata.pair(config['image_size'])
  return ParsedWeights(result, NAMES, model, ModelMetadata(size))


def written_config(model: Any) -> dict[str, Any]:
  """Returns the sizes and options of a model for config.json.

  Raises:
    UserError: transformers has no equivalent model.
  """
  others = [f'pool {model.pool!r}'] if model.pool != 'token' else []
  others += ['a head'] if model.num_classes else []
  if others:
    raise UserError(
      f"Hugging Face's DINOv3ViT has no {' and no '.join(others)}, but this "
      'model has: it cannot be written as such a directory. A directory of '
      'vit_jax can contain every model.'
    )
  biases = BIASES[model.qkv_bias]
  return dict(
    patch_size=model.patch_size,
    hidden_size=model.width,
    intermediate_size=model.mlp_dim,
    num_hidden_layers=model.depth,
    num_attention_heads=model.num_heads,
    num_register_tokens=model.registers,
    hidden_act='silu' if model.gated else metadata.ACTIVATION_NAMES[model.gelu],
    use_gated_mlp=model.gated,
    layer_norm_eps=model.norm_eps,
    rope_theta=model.rope_base or ROTATIONS['centered'],
    proj_bias=model.bias,
    mlp_bias=model.bias,
    **{f'{name}_bias': name in biases for name in BIASES['all']},
  )


def completed(model: Any, arrays: Arrays) -> Arrays:
  """Splits gated matrices, and adds arrays that transformers requires."""
  arrays = {_MASK: np.zeros((1, 1, model.width), np.float32)} | arrays
  arrays.setdefault(_REGISTERS, np.zeros((1, 0, model.width), np.float32))
  for i in range(model.depth):
    for j in (1, 2):
      scale = np.ones(model.width, np.float32)
      arrays.setdefault(f'layer.{i}.layer_scale{j}.lambda1', scale)
  for name in [name for name in arrays if _UP in name and model.gated]:
    gate, up = np.split(arrays[name], 2)
    arrays |= {name.replace(_UP, _GATE): gate, name: up}
  return arrays
