"""Derives the sizes and options of Vision Transformers from their arrays.

Files of all projects are treated alike: a table of names (`names.NameMap`)
determines under which name a parameter is stored. An option of the model is set
if the file contains the parameter that only this option adds (`_SHOWN_BY`).
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.arrays.pixels import IMAGENET
from vit_jax.models.attention.attention import BIASES
from vit_jax.models.positions import sincos2d
from vit_jax.weights import names as names_lib
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.names import NameMap

log = logging.getLogger('vit_jax')
_LAYER = 'encoder/layers/'
# Arrays of MAE's decoder, and mask tokens
_DECODER = re.compile(r'decoder_|mask_token$')
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

  The result may contain options whose value is the default.

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
  if names.torch:  # [d, c, p, p]
    width, channels, patch_size, _ = kernel
  else:  # [p, p, c, d]
    patch_size, _, channels, width = kernel
  entry = names.find(f'{_LAYER}mlp/fc1/kernel')
  assert entry is not None
  prefix, number, _ = entry.name.partition('{i}')
  is_stacked = not number  # one array contains all layers
  fc1 = find(f'{_LAYER}mlp/fc1/kernel')
  fc2 = shape(f'{_LAYER}mlp/fc2/kernel', 3 if is_stacked else 2)
  mlp_dim = fc2[-1] if names.torch else fc2[-2]
  if is_stacked:
    depth = fc2[0]
  else:
    pattern = rf'{re.escape(prefix)}(\d+)[./]'
    layers = [re.match(pattern, name) for name in arrays]
    depth = max((int(layer[1]) + 1 for layer in layers if layer), default=0)
  model: dict[str, Any] = dict(
    patch_size=patch_size,
    width=width,
    depth=depth,
    mlp_dim=mlp_dim,
    channels=channels,
    pool='gap' if find('cls') is None else 'token',
    # The first matrix of a gated MLP contains value and gate.
    gated=fc1 is not None and fc1.size == 2 * math.prod(fc2),
    bias=find(f'{_LAYER}attention/out/bias') is not None,
  )
  if find('map/probe') is not None:
    model['pool'] = 'map'
    model['class_token'] = find('cls') is not None or None
  if find('registers') is not None:
    model['registers'] = shape('registers', 3)[1]
  for where, at in ((_LAYER, 'layers'), ('', 'shared')):
    if find(f'{where}position/biases') is not None:
      model |= dict(position='relative_bias', position_at=at)
  if find(f'{_LAYER}scale1') is not None:
    model['layer_scale'] = _LAYER_SCALE
  norms = (f'{_LAYER}norm1', f'{_LAYER}norm2', 'encoder/norm')
  if all(find(f'{norm}/bias') is None for norm in norms):
    model['norm'] = 'rms'
  with_bias = tuple(
    name
    for name in BIASES['all']
    if find(f'{_LAYER}attention/{name}/bias') is not None
  )
  for qkv_bias, projections in BIASES.items():
    if with_bias == projections:
      model['qkv_bias'] = qkv_bias
  if model['pool'] == 'map':
    pool_mlp = shape('map/mlp/fc2/kernel', 2)[-1 if names.torch else -2]
    if pool_mlp != mlp_dim:
      model['map_mlp_dim'] = pool_mlp
  norm = find(_SHOWN_BY['qk_norm'])
  if norm is not None:  # one scale for each channel of a head
    model['num_heads'] = model['width'] // max(norm.size, 1)
  elif not names.torch:  # [d, h, d/h]
    rank = 4 if is_stacked else 3
    query = shape(f'{_LAYER}attention/query/kernel', rank)
    model['num_heads'] = query[-2]
  options = [k for k, name in _SHOWN_BY.items() if find(name) is not None]
  return model | dict.fromkeys(options, True)


def with_decoder(
  path: str,
  parsed: ParsedWeights,
  num_heads: int | None = None,
  norm_pixels: bool = True,
) -> ParsedWeights:
  """Returns an encoder with the decoder in its file if both are those of MAE.

  Arrays of other decoders and mask tokens are left out.

  Args:
    path: path of the file, for messages.
    parsed: all arrays, and the properties of the encoder.
    num_heads: attention heads of the decoder; None for heads of 32 channels, as
      in the models of MAE's authors.
    norm_pixels: key of the objective `mae`.
  """
  decoder = {k: v for k, v in parsed.arrays.items() if _DECODER.match(k)}
  if not decoder:
    return parsed
  arrays = {k: v for k, v in parsed.arrays.items() if k not in decoder}
  encoder = parsed._replace(arrays=arrays)
  if decoder.keys() == {'mask_token'}:
    log.info('%s: left out its mask token, which is not used', path)
    return encoder
  hidden = []  # biases of the hidden units of each layer
  if fc1 := parsed.names.find('decoder/blocks/layers/mlp/fc1/bias'):
    pattern = fc1.name.replace('{i}', r'\d+')
    hidden = [v for k, v in decoder.items() if re.fullmatch(pattern, k)]
  table = decoder.pop('decoder_pos_embed', None)
  if table is None or not hidden or not _is_of_mae(parsed, table):
    # Without hidden layers, the arrays are only remains of a decoder.
    log.log(
      logging.WARNING if hidden else logging.INFO,
      "%s: left out a decoder and its mask token (MAE's), %d arrays; supported "
      "are pixels normalized by ImageNet's mean and std, exact GELU and fixed "
      'positions',
      path,
      len(parsed.arrays) - len(arrays),
    )
    return encoder
  width = table.shape[-1]
  sizes = dict(width=width, depth=len(hidden), mlp_dim=hidden[0].size)
  heads = num_heads or max(width // 32, 1)
  section = sizes | dict(num_heads=heads, dtype='float32')
  return encoder._replace(
    arrays=arrays | decoder,
    objective=dict(name='mae', norm_pixels=norm_pixels, decoder=section),
  )


def _is_of_mae(parsed: ParsedWeights, table: np.ndarray) -> bool:
  """Returns whether a decoder has the pixels, GELU and positions of MAE.

  Args:
    parsed: properties of the encoder.
    table: position embeddings of the decoder, `[1, 1 + p, d]`.
  """
  metadata, patch_size = parsed.metadata, parsed.model.get('patch_size', 1)
  rows, columns = (side // patch_size for side in metadata.image_size)
  fixed = sincos2d((rows, columns), table.shape[-1], last_included=False)
  return (
    (tuple(metadata.mean), tuple(metadata.std)) == IMAGENET
    and metadata.gelu == 'exact'
    and table[0, 1:].shape == fixed.shape
    and np.allclose(table[0, 1:], fixed, atol=0.01)
  )
