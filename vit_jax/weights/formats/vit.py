"""Derives the sizes and options of Vision Transformers from their arrays.

Files of all projects are treated alike: a table of names (`names.NameMap`)
determines under which name a parameter is stored, and a parameter that exists
in a file shows its option.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.models.attention.attention import BIASES
from vit_jax.weights import names as names_lib
from vit_jax.weights.names import NameMap
from vit_jax.weights.patch_embedding import RGB

_LAYER = 'encoder/layers/'
_LAYER_SCALE = 1e-4  # an initial value, which loaded weights replace
# {option of the model: parameter that exists if the option is set}
_SHOWN_BY = {
  'distilled': 'distillation',
  'qk_norm': f'{_LAYER}attention/query_norm/scale',
  'attention_norm': f'{_LAYER}attention/norm/scale',
  'mlp_norm': f'{_LAYER}mlp/norm/scale',
  'patch_norm': 'patch_norm/scale',
  'pre_norm': 'pre_norm/scale',
  'fc_norm': 'fc_norm/scale',  # in place of `encoder/norm`
  'pre_logits': 'pre_logits/kernel',
}


def section(
  path: str, arrays: Mapping[str, np.ndarray], names: NameMap, kind: str
) -> dict[str, Any]:
  """Returns the keys of the `model` section that the arrays determine.

  They do not determine `num_heads` in PyTorch's layout without `qk_norm`.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.
    names: names of the parameters in the file.
    kind: description of the models, for messages.

  Raises:
    UserError: an array that every Vision Transformer has is missing.
  """

  def find(parameter: str) -> np.ndarray | None:
    name = names.first(parameter)
    return None if name is None else arrays.get(name)

  def shape(parameter: str, rank: int) -> tuple[int, ...]:
    name = names.first(parameter)
    assert name is not None
    return names_lib.shape_of(path, arrays, name, rank, kind)

  kernel = shape('embedding/kernel', 4)
  entry = names.find(f'{_LAYER}mlp/fc1/kernel')
  assert entry is not None
  prefix, number, _ = entry.name.partition('{i}')
  is_stacked = not number  # one array contains all layers
  units = shape(f'{_LAYER}mlp/fc1/kernel', 2 + is_stacked)
  mlp = shape(f'{_LAYER}mlp/fc2/kernel', 2 + is_stacked)
  mlp_dim = mlp[-1] if names.torch else mlp[-2]
  layers = [re.match(rf'{re.escape(prefix)}(\d+)[./]', name) for name in arrays]
  model: dict[str, Any] = dict(
    patch_size=kernel[2] if names.torch else kernel[0],
    width=kernel[0] if names.torch else kernel[-1],
    depth=units[0]
    if is_stacked
    else max((int(layer[1]) + 1 for layer in layers if layer), default=0),
    mlp_dim=mlp_dim,
    pool='gap' if find('cls') is None else 'token',
  )
  if find('map/probe') is not None:
    model['pool'] = 'map'
    if find('cls') is not None:
      model['class_token'] = True
  channels = kernel[1 if names.torch else 2]
  if channels != RGB:
    model['channels'] = channels
  if (
    units[0] if names.torch else units[-1]
  ) == 2 * mlp_dim:  # value and gate, joined
    model['gated'] = True
  if find('registers') is not None:
    model['registers'] = shape('registers', 3)[1]
  if find(f'{_LAYER}scale1') is not None:
    model['layer_scale'] = _LAYER_SCALE
  norms = (f'{_LAYER}norm1', f'{_LAYER}norm2', 'encoder/norm')
  if all(find(f'{norm}/bias') is None for norm in norms):
    model['norm'] = 'rms'
  if find(f'{_LAYER}attention/out/bias') is None:
    model['bias'] = False
  with_bias = tuple(
    name
    for name in BIASES['all']
    if find(f'{_LAYER}attention/{name}/bias') is not None
  )
  for qkv_bias, projections in BIASES.items():
    if with_bias == projections != BIASES['all']:
      model['qkv_bias'] = qkv_bias
  if model['pool'] == 'map':
    pool_mlp = shape('map/mlp/fc2/kernel', 2)[-1 if names.torch else -2]
    if pool_mlp != mlp_dim:
      model['map_mlp_dim'] = pool_mlp
  norm = find(_SHOWN_BY['qk_norm'])
  if norm is not None:  # one scale for each channel of a head
    model['num_heads'] = model['width'] // max(norm.size, 1)
  elif not names.torch:  # [d, h, d/h]
    query = shape(f'{_LAYER}attention/query/kernel', 3 + is_stacked)
    model['num_heads'] = query[-2]
  shown = {
    key: True for key, name in _SHOWN_BY.items() if find(name) is not None
  }
  return model | shown
