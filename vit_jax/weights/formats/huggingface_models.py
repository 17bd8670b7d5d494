"""Vision Transformers, DINOv3 and Swin as the library transformers names them.

`parse_vit` and `parse_swin` derive a model from arrays and config.json.
`written` returns how a Vision Transformer is written; a Swin is not. Since its
major version 5, transformers uses other names in memory, but files contain the
older ones; both can be read.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.attention.attention import BIASES
from vit_jax.models.positions import ROTATIONS
from vit_jax.models.swin import MLP_RATIO, PATCH_SIZE
from vit_jax.models.vit import SIZE_KEYS, ViT
from vit_jax.weights import foreign, metadata
from vit_jax.weights import names as names_lib
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import containers, swin, timm_layouts, vit
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import Joined, NameMap
from vit_jax.weights.patch_embedding import RGB

log = logging.getLogger('vit_jax')
Arrays = dict[str, np.ndarray]
Config = Mapping[str, Any]


class Written(NamedTuple):
  """A model as transformers describes it.

  Attributes:
    kind: `model_type`.
    class_name: prefix of the names of its classes.
    names: names of the parameters in files.
    config: sizes and options in config.json.
    supported: options of the model that the type has, in addition to its sizes.
    equivalent: see `foreign.check_opens`.
  """

  kind: str
  class_name: str
  names: NameMap
  config: dict[str, Any]
  supported: tuple[str, ...]
  equivalent: dict[str, Any]


# Vision Transformers

# Keys of the model that all types except DINOv3 have
_KEYS = (*SIZE_KEYS, 'gelu', 'norm_eps', 'prefix_positions')
_PRE_LOGITS = 'pre-logits before the head'
_LAYER, _FOREIGN_LAYER = 'encoder/layers/', 'encoder.layer.{i}.'
_CLS, POSITIONS = 'embeddings.cls_token', 'embeddings.position_embeddings'
_DISTILLATION = 'embeddings.distillation_token'
_REGISTERS = 'embeddings.register_tokens'
_MASK = 'embeddings.mask_token'
_PATCHES = 'embeddings.patch_embeddings.projection'
_SCALE = 'layer_scale{}.lambda1'
_DINOV3_NAMES = NameMap(names_lib.table('dinov3'))
_DINOV3_SCALE = f'layer.{{i}}.{_SCALE}'
_DINOV3_GATE, _DINOV3_UP = '.mlp.gate_proj.', '.mlp.up_proj.'
VIT_NAMES = names_lib.table('transformers')
_BIASES = 'relative_position_bias.relative_position_bias_table'  # of BEiT
VIT_ALIASES = (
  (rf'^({containers.BASES}|model)\.', ''),
  *names_lib.aliases('transformers'),
)
# Arrays that the model does not use: mask tokens, text towers, decoders
_LEFT_OUT = (
  r'embeddings\.(mask_token|position_ids)|decoder\.|text_(model|projection)\.|'
  r'logit_(scale|bias)|lm_head\.|.*relative_position_index$'
)
# Interpolation of positions by the library: those of other types are bicubic
# without antialiasing. DINOv3 has none.
_METHODS = {
  'dinov2_with_registers': 'bicubic',
  'siglip2_vision_model': 'bilinear',
  'dinov3_vit': None,
}
# Types that are image towers, whose arrays determine the image size
TOWERS = ('clip_vision_model', 'siglip_vision_model', 'siglip2_vision_model')
_KERNEL = f'{_PATCHES}.weight'
_KIND = 'a Vision Transformer'
_LAYER_SCALE = 1e-5  # an initial value, which loaded weights replace


def parse_vit(path: str, arrays: Arrays, config: Config) -> ParsedWeights:
  """Parses a Vision Transformer.

  Raises:
    UserError: the config contradicts the arrays, or describes an activation
      that is not supported.
  """
  arrays = _used(path, arrays)
  if config['model_type'] in TOWERS:
    arrays = _tower(path, arrays)
    table = names_lib.shape_of(path, arrays, POSITIONS, 3, _KIND)
    # The class token of CLIP adds 1 to a square, whose root is rounded down.
    side = math.isqrt(table[1]) * arrays[_KERNEL].shape[-1]
    config = {**config, 'image_size': side}
  if 'distillation_classifier.weight' not in arrays and _DISTILLATION in arrays:
    # A token whose output is not used is a register.
    arrays[_REGISTERS] = arrays.pop(_DISTILLATION)
    tokens_have_positions = True
  else:  # registers of DINOv2 have no positions
    tokens_have_positions = _REGISTERS not in arrays
  for name in [name for name in arrays if name.endswith(_BIASES)]:
    # The three rows of the class token (to, from and within it) are the last
    # ones, and here the first ones.
    arrays[name] = np.roll(arrays[name], 3, axis=0)
  names = NameMap(VIT_NAMES)
  model = vit.section(path, arrays, names, _KIND)
  model['num_heads'] = config['num_attention_heads']
  # Configs of BEiT have a boolean for each kind of positions.
  kinds = [v for k, v in config.items() if re.match(r'use_.*position', k)]
  if kinds and not any(kinds):
    model['position'] = 'none'
  if config.get('use_mean_pooling') and 'fc_norm' not in model:
    model['final_norm'] = 'layernorm.weight' in arrays
  head = arrays.get('classifier.weight')
  if head is not None and head.shape[-1] == 2 * model['width']:
    model['pool'] = 'token_gap'
  positions = None  # of patches
  if POSITIONS in arrays:
    prefix = int(_CLS in arrays)
    if tokens_have_positions:
      prefix += model.get('registers', 0) + model.get('distilled', False)
    positions = arrays[POSITIONS].shape[1] - prefix
  _check_sizes(path, config, model, positions)
  if config['model_type'] == 'dinov3_vit':
    if model['gated'] and config['hidden_act'] != 'silu':
      raise UserError(
        f'config.json of {path}: hidden_act is {config["hidden_act"]!r}; '
        "for gated MLPs, the model vit supports 'silu'."
      )
    base = float(config['rope_theta'])
    model['rope_base'] = None if base == ROTATIONS['centered'] else base
    model |= dict(position='none', rope='centered')
  elif not tokens_have_positions:
    model['prefix_positions'] = False
    arrays = foreign.without_class_position(arrays, _CLS, POSITIONS)
  if 'layer_scale' in model:
    model['layer_scale'] = _LAYER_SCALE
  method = _METHODS.get(config['model_type'], 'bicubic_no_antialias')
  if model.get('position') == 'relative_bias':
    method = 'bilinear_no_antialias'
  size = metadata.pair(config['image_size'])
  properties = ModelMetadata(size, position_resize=method)
  return ParsedWeights(arrays, names, model, properties)


def _check_sizes(
  path: str, config: Config, model: Mapping[str, Any], positions: int | None
) -> None:
  """Checks that a config has the sizes of the model that the arrays determine.

  Args:
    path: path of the directory, for messages.
    config: content of config.json.
    model: keys of the model.
    positions: number of patches that have a position; None if positions are not
      learned, so that images may have any size of at least one patch.

  Raises:
    UserError: it has another size.
  """
  patch_size, image_size = model['patch_size'], config['image_size']
  patches = math.prod(side // patch_size for side in metadata.pair(image_size))
  fits = patches > 0 if positions is None else patches == positions
  shown = f'{positions or 1} patch(es) of {patch_size} pixels'
  of_arrays = {
    'hidden_size': model['width'],
    'num_hidden_layers': model['depth'],
    'patch_size': patch_size,
    'image_size': image_size if fits else shown,
  }
  _check_config(path, config, of_arrays)


def _check_config(
  path: str, config: Config, of_arrays: Mapping[str, Any]
) -> None:
  """Checks that a config has the values that the arrays determine.

  Raises:
    UserError: it has another value; keys that it does not contain may have any.
  """
  for key, value in of_arrays.items():
    if config.get(key, value) != value:
      raise UserError(
        f'config.json of {path}: {key} is {config[key]!r}, but its arrays are '
        f'those of {value}. Fetch all files of one version again.'
      )


def _used(path: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
  """Returns the arrays that are used, with the names in files."""
  arrays = dict(arrays)
  for name in [name for name in arrays if _DINOV3_GATE in name]:
    up = name.replace(_DINOV3_GATE, _DINOV3_UP)
    # Here, one array contains both; the gate comes first.
    arrays[up] = np.concatenate([arrays.pop(name), arrays[up]])
  arrays = names_lib.renamed(arrays, VIT_ALIASES)
  result = {k: v for k, v in arrays.items() if not re.match(_LEFT_OUT, k)}
  if len(result) < len(arrays):
    unused = [name for name in arrays if name not in result]
    log.info('%s: left out %s, …', path, ', '.join(unused[:3]))
  if _REGISTERS in result and not result[_REGISTERS].size:
    del result[_REGISTERS]
  for name in (_CLS, POSITIONS):  # one dimension fewer in CLIP and SigLIP
    if name in result:
      result[name] = np.array(result[name], ndmin=3)
  width = result.get('layernorm.weight', np.zeros(0)).shape[0]
  head = result.get('classifier.weight')
  # The head of DINOv2 has 2 d inputs, the class token and the mean of the
  # patches. For heads of the class token, `completed` adds zeros, which are
  # removed here.
  if head is not None and width and not np.any(head[:, width:]):
    result['classifier.weight'] = head[:, :width]
  return result


def _tower(path: str, arrays: Arrays) -> Arrays:
  """Returns the arrays of an image tower, completed by zeros.

  A projection is the head of the model, and has no bias.

  Raises:
    UserError: the kernel of the patch embedding is missing or has another rank.
  """
  kernel = arrays.get(_KERNEL, np.zeros(()))
  rank = 2 if kernel.ndim == 2 else 4
  width, inputs, *_ = names_lib.shape_of(path, arrays, _KERNEL, rank, _KIND)
  if rank == 2:  # NaFlex: [d, p * p * 3] to [d, 3, p, p]
    side = math.isqrt(inputs // RGB)
    kernel = kernel.reshape(width, side, side, -1).transpose(0, 3, 1, 2)
  # The patch embedding of CLIP has no bias.
  arrays = {f'{_PATCHES}.bias': np.zeros(width, np.float32)} | arrays
  arrays[_KERNEL] = kernel
  # The classifiers of CLIP and SigLIP are applied to the mean of the patches.
  if 'classifier.bias' in arrays:
    if _CLS in arrays:  # CLIP, whose mean is that before the last LayerNorm
      left_out = 'classifier.'
      log.warning('%s: left out its classifier, which the vit lacks', path)
    else:  # SigLIP, whose attention pooling the classifier does not use
      left_out = 'head.'
    arrays = {k: v for k, v in arrays.items() if not k.startswith(left_out)}
  elif 'classifier.weight' in arrays:
    outputs = len(arrays['classifier.weight'])
    arrays['classifier.bias'] = np.zeros(outputs, np.float32)
  return arrays


def written(model: Any) -> Written:
  """Returns the names and the config of a model.

  Raises:
    UserError: transformers has no equivalent type.
  """
  if not isinstance(model, ViT):
    raise names_lib.not_writable(f'the layers of a {type(model).__name__}')
  config: dict[str, Any] = dict(
    patch_size=model.patch_size,
    hidden_size=model.width,
    num_hidden_layers=model.depth,
    num_attention_heads=model.num_heads,
    hidden_act=metadata.ACTIVATION_NAMES[model.gelu],
    layer_norm_eps=model.norm_eps,
  )
  if model.config.rotary == 'centered':
    return _written_dinov3(model, config)
  config['qkv_bias'] = True
  has_layers_of_dinov2 = model.layer_scale is not None or model.gated
  # A register with a position is a distillation token that is not used;
  # registers of Dinov2WithRegisters have no position.
  has_unused_token = (
    model.registers == 1 and model.prefix_positions and not has_layers_of_dinov2
  )
  is_deit = model.distilled or has_unused_token
  is_dinov2 = (
    model.registers or has_layers_of_dinov2 or model.pool == 'token_gap'
  )
  if is_dinov2 and not is_deit:
    return _written_dinov2(model, config)
  kind, class_name = ('deit', 'DeiT') if is_deit else ('vit', 'ViT')
  names: dict[str, str | Joined] = dict(VIT_NAMES)
  keys = [*_KEYS]
  if model.distilled:
    keys.append('distilled')
    names['head'] = 'cls_classifier'
  elif has_unused_token:
    keys.append('registers')
    names['registers'] = _DISTILLATION
  config |= dict(
    intermediate_size=model.mlp_dim,
    pooler_act='tanh',
    pooler_output_size=model.width,
  )
  # Pre-logits are written as the pooler, which only a ViT without a head has.
  if model.pre_logits and (model.num_classes or is_deit):
    raise _not_in_type([_PRE_LOGITS], kind)
  equivalent = {'prefix_positions': True}
  return Written(
    kind, class_name, NameMap(names), config, tuple(keys), equivalent
  )


def _written_dinov2(model: Any, config: dict[str, Any]) -> Written:
  """Returns names and config of a DINOv2, given the keys of all types."""
  names: dict[str, str | Joined] = dict(VIT_NAMES)
  mlp = ('weights_in', 'weights_out') if model.gated else ('fc1', 'fc2')
  for i, name in enumerate(mlp, 1):
    names[f'{_LAYER}norm{i}'] = f'{_FOREIGN_LAYER}norm{i}'
    names[f'{_LAYER}mlp/fc{i}'] = f'{_FOREIGN_LAYER}mlp.{name}'
  keys = [*_KEYS, 'registers', 'layer_scale', 'gated']
  if model.pool == 'token_gap':  # the input of the head
    keys.append('pool')
  ratio, scale = _mlp_ratio(model), model.layer_scale
  config = config | dict(
    mlp_ratio=ratio,
    use_swiglu_ffn=model.gated,
    layerscale_value=1.0 if scale is None else scale,
  )
  kind, class_name = 'dinov2', 'Dinov2'
  if model.registers:
    kind, class_name = 'dinov2_with_registers', 'Dinov2WithRegisters'
    config['num_register_tokens'] = model.registers
  missing = [_PRE_LOGITS] if model.pre_logits else []
  if ratio is None:
    missing.append(f'MLP of {model.mlp_dim} units for a width of {model.width}')
  if missing:
    raise _not_in_type(missing, kind)
  equivalent = {
    # Positions of registers are added to the tokens.
    'prefix_positions': not model.registers,
    'layer_scale': _LAYER_SCALE,
  }
  return Written(
    kind, class_name, NameMap(names), config, tuple(keys), equivalent
  )


def _not_in_type(missing: list[str], kind: str) -> UserError:
  """Returns the error for parts of a model that a type does not have."""
  return names_lib.not_writable(
    f'{" and ".join(missing)}, as the type {kind} has none'
  )


def _mlp_ratio(model: Any) -> int | None:
  """Returns DINOv2's ratio of MLP and width; None if it is not a whole number.

  Gated MLPs have two thirds of the units, rounded up to a multiple of 8.
  """
  ratio = round(model.mlp_dim * (1.5 if model.gated else 1) / model.width)
  units = ratio * model.width
  if model.gated:
    units = (units * 2 // 3 + 7) // 8 * 8
  return ratio if units == model.mlp_dim else None


def _written_dinov3(model: Any, config: dict[str, Any]) -> Written:
  """Returns names and config of a DINOv3, given the keys of all types."""
  if model.num_classes:
    raise names_lib.not_writable('a head, as the type dinov3_vit has none')
  biases = BIASES[model.qkv_bias]
  config = config | dict(
    intermediate_size=model.mlp_dim,
    num_register_tokens=model.registers,
    use_gated_mlp=model.gated,
    rope_theta=model.rope_base or ROTATIONS['centered'],
    proj_bias=model.bias,
    mlp_bias=model.bias,
    **{f'{name}_bias': name in biases for name in BIASES['all']},
  )
  equivalent: dict[str, Any] = dict(layer_scale=_LAYER_SCALE)
  if model.gated:
    config['hidden_act'] = 'silu'
    equivalent['gelu'] = 'silu'
  if model.position == 'rope2d':
    equivalent |= dict(position='none', rope='centered')
  keys = (*SIZE_KEYS, 'gelu', 'norm_eps', 'position', 'rope', 'rope_base')
  keys += ('registers', 'layer_scale', 'gated', 'qkv_bias', 'bias')
  return Written(
    'dinov3_vit', 'DINOv3ViT', _DINOV3_NAMES, config, keys, equivalent
  )


def completed(model: Any, kind: str, arrays: Arrays) -> Arrays:
  """Returns the arrays that the type of a model requires in transformers.

  The additional ones (positions, LayerScale, half of a head) are zeros or ones,
  which have no effect in the model.

  Args:
    model: model that is written.
    kind: type of the model.
    arrays: arrays of the parameters.
  """
  arrays, width = dict(arrays), model.width
  if kind.startswith('dino'):
    scale = _DINOV3_SCALE if kind == 'dinov3_vit' else _FOREIGN_LAYER + _SCALE
    for i in range(model.depth):
      for j in (1, 2):
        name = scale.format(j, i=i)
        arrays.setdefault(name, np.ones(width, np.float32))
  if kind == 'dinov3_vit':
    arrays.setdefault(_REGISTERS, np.zeros((1, 0, width), np.float32))
    # The library has two matrices for a gated MLP.
    for name in [name for name in arrays if _DINOV3_UP in name and model.gated]:
      gate, up = np.split(arrays[name], 2)
      arrays |= {name.replace(_DINOV3_UP, _DINOV3_GATE): gate, name: up}
    return arrays
  table = arrays[POSITIONS]
  if not model.prefix_positions:  # the class token requires a position
    table = np.pad(table, ((0, 0), (1 + model.distilled, 0), (0, 0)))
  elif kind == 'dinov2_with_registers':
    # Registers have no positions in transformers: ours are added to the tokens.
    cls, positions, patches = np.split(table, [1, 1 + model.registers], axis=1)
    arrays[_REGISTERS] = arrays[_REGISTERS] + positions
    table = np.concatenate([cls, patches], axis=1)
  arrays[POSITIONS] = table
  # The input of the head in transformers includes the mean of the patches.
  if kind.startswith('dino') and model.num_classes and model.pool == 'token':
    head = arrays['classifier.weight']
    arrays['classifier.weight'] = np.pad(head, ((0, 0), (0, width)))
  return arrays


def unused(model: Any, kind: str) -> Arrays:
  """Returns arrays that transformers requires, but that do not affect results.

  Args:
    model: model that is written.
    kind: type of the model.
  """
  if not kind.startswith('dino'):
    return {}
  shape = (1, 1, model.width) if kind == 'dinov3_vit' else (1, model.width)
  return {_MASK: np.zeros(shape, np.float32)}


# Swin

# Constants of the model; other values in a config are an error.
SWIN_FIXED = {
  'patch_size': PATCH_SIZE,
  'mlp_ratio': float(MLP_RATIO),
  'qkv_bias': True,
  'use_absolute_embeddings': False,
}


def parse_swin(path: str, arrays: Arrays, config: Config) -> ParsedWeights:
  """Parses a Swin.

  Raises:
    UserError: the config describes a Swin that is not supported, or contradicts
      the arrays.
  """
  heads, stages = list(config['num_heads']), len(config['depths'])

  def doubled(first: int) -> list[int]:
    return [first * 2**i for i in range(stages)]

  expected = SWIN_FIXED | {
    'num_heads': doubled(heads[0]) if heads else 'one for each stage'
  }
  other = {k: config[k] for k, v in expected.items() if config[k] != v}
  if other:
    allowed = {key: expected[key] for key in other}
    raise UserError(
      f'config.json of {path} has {other}; the model swin supports {allowed}.'
    )
  arrays = names_lib.renamed(arrays, VIT_ALIASES)
  arrays = names_lib.renamed(arrays, names_lib.aliases('Swin of transformers'))
  parsed = swin.parse(
    path,
    timm_layouts.joined(arrays),
    {'window_size': config['window_size'], 'window_rule': 'authors'},
    metadata.pair(config['image_size']),
  )
  model = parsed.model
  of_arrays = {
    'embed_dim': model['width'],
    'depths': [*model['depths']],
    'num_heads': doubled(model['num_heads']),
  }
  _check_config(path, config, of_arrays)
  return parsed
