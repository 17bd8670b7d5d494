"""Vision Transformers in Hugging Face directories.

These are ViT, DeiT, DINOv2 and DINOv2 with registers. Since its major version
5, transformers uses other names in memory, but files contain the older ones;
both can be read.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.vit import ViT
from vit_jax.weights.formats import foreign, settings
from vit_jax.weights.formats import huggingface_processor as processor
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming

log = logging.getLogger('vit_jax')
# Prefixes of class names in transformers, by type of model.
CLASSES = {
  'vit': 'ViT',
  'deit': 'DeiT',
  'dinov2': 'Dinov2',
  'dinov2_with_registers': 'Dinov2WithRegisters',
}
_LAYER, _THERE = 'encoder/layers/', 'encoder.layer.{i}.'
NAMES = {
  'cls': 'embeddings.cls_token',
  'position/embedding': 'embeddings.position_embeddings',
  'embedding': 'embeddings.patch_embeddings.projection',
  **{
    f'{_LAYER}attention/{part}': f'{_THERE}attention.attention.{part}'
    for part in ('query', 'key', 'value')
  },
  f'{_LAYER}attention/out': f'{_THERE}attention.output.dense',
  f'{_LAYER}norm1': f'{_THERE}layernorm_before',
  f'{_LAYER}norm2': f'{_THERE}layernorm_after',
  f'{_LAYER}mlp/fc1': f'{_THERE}intermediate.dense',
  f'{_LAYER}mlp/fc2': f'{_THERE}output.dense',
  f'{_LAYER}scale1': f'{_THERE}layer_scale1.lambda1',
  f'{_LAYER}scale2': f'{_THERE}layer_scale2.lambda1',
  'distillation': 'embeddings.distillation_token',
  'registers': 'embeddings.register_tokens',
  'head_distillation': 'distillation_classifier',
  'encoder/norm': 'layernorm',
  'pre_logits': 'pooler.dense',
  'head': 'classifier',
}
NAMING = Naming(NAMES, torch=True)
# Names that differ in DINOv2: (without, with) gated MLPs.
_DINOV2 = {
  'norm1': ('norm1', 'norm1'),
  'norm2': ('norm2', 'norm2'),
  'mlp/fc1': ('mlp.fc1', 'mlp.weights_in'),
  'mlp/fc2': ('mlp.fc2', 'mlp.weights_out'),
}
_ACTIVATIONS = {
  'exact': 'gelu',
  'tanh': 'gelu_pytorch_tanh',
  'quick': 'quick_gelu',
}
_LAYER_SCALE = 1e-5  # an initial value, which loaded weights replace
_ALIASES = (
  (r'^(vit|deit|dinov2|dinov2_with_registers)\.', ''),
  (r'^(encoder\.)?layers?\.', 'encoder.layer.'),
  (r'\.attention\.q_proj\.', '.attention.attention.query.'),
  (r'\.attention\.k_proj\.', '.attention.attention.key.'),
  (r'\.attention\.v_proj\.', '.attention.attention.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
  (r'\.norm1\.', '.layernorm_before.'),
  (r'\.norm2\.', '.layernorm_after.'),
  (r'\.mlp\.(fc1|weights_in)\.', '.intermediate.dense.'),
  (r'\.mlp\.(fc2|weights_out)\.', '.output.dense.'),
  (r'^cls_classifier\.', 'classifier.'),
)

RULES: settings.Rules = {
  'patch_size': settings.integer(1, 2**12),
  'hidden_size': settings.integer(1, 2**15),
  'num_hidden_layers': settings.integer(1, 1000),
  'num_attention_heads': settings.integer(1, 4096),
  'intermediate_size': settings.integer(1, 2**18),
  'mlp_ratio': settings.number(0.01, 64),
  'image_size': processor.SIZE,
}
REQUIRED = (
  'patch_size',
  'hidden_size',
  'num_hidden_layers',
  'num_attention_heads',
  'image_size',
)


def describe(
  path: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Described:
  """Describes the model of a directory.

  Args:
    path: path of the directory, for messages.
    arrays: all arrays in the directory.
    config: content of config.json, validated by `RULES`.

  Raises:
    UserError: the sizes in the config contradict each other.
  """
  arrays, options = _options(_renamed(path, arrays))
  keys = _keys(path, config) | options
  size = processor.pair(config['image_size'])
  if min(size) < keys['patch_size']:
    raise UserError(
      f'config.json of {path}: image_size is {config["image_size"]}; it must '
      f'be at least patch_size, {keys["patch_size"]}.'
    )
  # The library uses antialiasing for one type of model only.
  antialiased = config['model_type'] == 'dinov2_with_registers'
  method = 'bicubic' if antialiased else 'bicubic_no_antialias'
  return Described(arrays, NAMING, keys, size, position_resize=method)


def _renamed(
  path: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the arrays that are used, with the names in files."""
  renamed = naming_lib.renamed(arrays, _ALIASES)
  if renamed.pop('embeddings.mask_token', None) is not None:
    log.info('%s: left out the mask token', path)
  width = renamed.get('layernorm.weight', np.zeros(0)).shape[0]
  head = renamed.get('classifier.weight')
  if head is not None and head.shape[-1] == 2 * width:
    if not np.any(head[:, width:]):  # a head that `completed` has padded
      return renamed | {'classifier.weight': head[:, :width]}
    for leaf in ('weight', 'bias'):
      renamed.pop(f'classifier.{leaf}', None)
    log.warning(
      '%s: left out the head, whose input is the class token and the mean of '
      'the patches; the model vit has no such head',
      path,
    )
  return renamed


def _keys(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the model's sizes.

  Raises:
    UserError: the width is not a multiple of the number of heads.
  """
  width, num_heads = config['hidden_size'], config['num_attention_heads']
  if width % num_heads:
    raise UserError(
      f'config.json of {path}: hidden_size is {width}; it must be a multiple '
      f'of num_attention_heads, {num_heads}.'
    )
  mlp_dim = int(config.get('mlp_ratio', 4) * width)
  return dict(
    patch_size=config['patch_size'],
    width=width,
    depth=config['num_hidden_layers'],
    num_heads=num_heads,
    mlp_dim=config.get('intermediate_size', max(mlp_dim, 1)),
  )


def _options(
  arrays: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Derives options from the arrays, and converts the tokens.

  Returns:
    Arrays, with tokens and positions as in this package, and options of the
    model.
  """
  options: dict[str, Any] = {
    'pool': 'token',
    'pre_logits': 'pooler.dense.weight' in arrays,
  }
  names = NAMES['distillation'], NAMES['registers']
  if names[0] in arrays and 'distillation_classifier.weight' in arrays:
    options['distilled'] = True
  elif names[0] in arrays:  # a token whose output is not used is a register
    arrays = {names[1] if k == names[0] else k: v for k, v in arrays.items()}
    options['registers'] = 1
  elif names[1] in arrays:  # registers without positions
    names_of_both = NAMES['cls'], NAMES['position/embedding']
    options['registers'] = arrays[names[1]].shape[1]
    options['prefix_positions'] = False
    arrays = foreign.without_class_position(arrays, *names_of_both)
  if 'encoder.layer.0.layer_scale1.lambda1' in arrays:
    options['layer_scale'] = _LAYER_SCALE
  units = arrays.get('encoder.layer.0.intermediate.dense.bias', np.zeros(0))
  out = arrays.get('encoder.layer.0.output.dense.weight', np.zeros((0, 1)))
  if units.size == 2 * out.shape[-1]:
    options |= {'gated': True, 'mlp_dim': out.shape[-1]}
  return arrays, options


def kind(model: Any) -> str:
  """Returns the `model_type` of a model in transformers.

  Raises:
    UserError: transformers has no equivalent type; the message lists the
      options that it lacks.
  """
  if not isinstance(model, ViT):
    raise UserError(
      f"a {type(model).__name__} cannot be written with Hugging Face's names, "
      'only Vision Transformers and Swins. Write a directory of vit_jax.'
    )
  if model.distilled:
    type_, supported = 'deit', ('distilled',)
  elif _is_deit(model):
    type_, supported = 'deit', ('registers',)
  elif model.registers:
    type_ = 'dinov2_with_registers'
    supported = ('registers', 'layer_scale', 'gated')
  elif model.layer_scale is not None or model.gated:
    type_, supported = 'dinov2', ('layer_scale', 'gated')
  else:
    type_, supported = 'vit', ()
  options = ('distilled', 'registers', 'layer_scale', 'gated', 'qk_norm')
  options += ('pre_norm',)
  unsupported = [
    name
    for name in options
    if name not in supported and getattr(model, name) not in (None, 0, False)
  ]
  if model.pool != 'token':
    unsupported.append(f'pool {model.pool!r}')
  if model.pre_logits and (model.num_classes or type_ != 'vit'):
    unsupported.append('pre-logits before the head')
  if model.distilled and not model.num_classes:
    unsupported.append('distillation token without a head')
  if type_.startswith('dinov2') and _mlp_ratio(model) is None:
    unsupported.append(
      f'MLP of {model.mlp_dim} units for a width of {model.width}'
    )
  if unsupported:
    raise UserError(
      f"Hugging Face's {CLASSES[type_]} has no {', '.join(unsupported)}, but "
      'this model has: it cannot be written as such a directory. A directory '
      'of vit_jax can contain every model.'
    )
  return type_


def _is_deit(model: Any) -> bool:
  """Returns whether a model is a DeiT whose distillation token is not used.

  Here, this token is a register with a position; registers of
  Dinov2WithRegisters have no position.
  """
  return (
    model.registers == 1
    and model.prefix_positions
    and model.layer_scale is None
    and not model.gated
    and not model.distilled
  )


def naming(model: Any) -> Naming:
  """Returns the names of a model's parameters in files of its type."""
  names = dict(NAMES)
  if kind(model).startswith('dinov2'):
    for path, each in _DINOV2.items():
      names[_LAYER + path] = _THERE + each[model.gated]
  if model.distilled:
    names['head'] = 'cls_classifier'
  elif _is_deit(model):
    names['registers'] = NAMES['distillation']
  return Naming(names, torch=True)


def completed(
  model: Any, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Adds the arrays that the type of a model requires in transformers.

  The additional arrays (positions, LayerScale, half of a head) are zeros or
  ones, which have no effect in the model.
  """
  table, scale = NAMES['position/embedding'], _THERE + 'layer_scale{j}.lambda1'
  type_, width = kind(model), model.width
  slots = np.asarray(arrays[table])
  if not model.prefix_positions:  # the class token requires a position
    prefix = 1 + model.distilled
    slots = np.pad(slots, ((0, 0), (prefix, 0), (0, 0)))
  elif model.registers and not _is_deit(model):
    # Registers have no positions in transformers: ours are added to the tokens.
    last = 1 + model.registers
    registers = NAMES['registers']
    arrays = arrays | {registers: arrays[registers] + slots[:, 1:last]}
    slots = np.concatenate([slots[:, :1], slots[:, last:]], axis=1)
  arrays = arrays | {table: slots}
  if not type_.startswith('dinov2'):
    return arrays
  arrays['embeddings.mask_token'] = np.zeros((1, width), np.float32)
  for i in range(model.depth if model.layer_scale is None else 0):
    for j in (1, 2):
      name = scale.format(i=i, j=j)
      arrays[name] = np.ones(width, np.float32)
  # The input of the head in transformers includes the mean of the patches.
  if model.num_classes:
    head = arrays['classifier.weight']
    arrays['classifier.weight'] = np.pad(head, ((0, 0), (0, width)))
  return arrays


def written(model: Any) -> dict[str, Any]:
  """Returns the sizes and options in a config.json of the model's type."""
  config = dict(
    patch_size=model.patch_size,
    hidden_size=model.width,
    num_hidden_layers=model.depth,
    num_attention_heads=model.num_heads,
    hidden_act=_ACTIVATIONS[model.gelu],
    layer_norm_eps=model.norm_eps,
    qkv_bias=True,
  )
  if not kind(model).startswith('dinov2'):
    return config | dict(
      intermediate_size=model.mlp_dim,
      pooler_act='tanh',
      pooler_output_size=model.width,
    )
  config |= dict(
    mlp_ratio=_mlp_ratio(model),
    use_swiglu_ffn=model.gated,
    layerscale_value=1.0 if model.layer_scale is None else model.layer_scale,
  )
  registers = {'num_register_tokens': model.registers}
  return config | (registers if model.registers else {})


def _mlp_ratio(model: Any) -> int | None:
  """Returns DINOv2's `mlp_ratio` for a model's `mlp_dim`; None if none fits."""
  gated = model.gated
  ratio = round(model.mlp_dim * (1.5 if gated else 1) / model.width)
  units = ratio * model.width
  if gated:  # two thirds, rounded up to a multiple of 8
    units = (units * 2 // 3 + 7) // 8 * 8
  return ratio if units == model.mlp_dim else None
