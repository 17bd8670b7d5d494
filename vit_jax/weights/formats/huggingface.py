"""Weights in Hugging Face directories: `config.json` and weight files.

They are those of the library `transformers`; see `TYPES`. Since its major
version 5, transformers uses other names in memory, but files contain the older
ones; both can be read.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.swin import MLP_RATIO, PATCH_SIZE, window_of
from vit_jax.models.vit import ViT
from vit_jax.weights import foreign, metadata
from vit_jax.weights import names as names_lib
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import containers, dinov3, swin, tensors, vit
from vit_jax.weights.formats import huggingface_processor as processor
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import Joined, NameMap
from vit_jax.weights.patch_embedding import RGB

log = logging.getLogger('vit_jax')
PyTree = Any
Arrays = dict[str, np.ndarray]
# Required keys of config.json.
_VIT_KEYS = ('num_attention_heads', 'image_size')
_SWIN_KEYS = ('embed_dim', 'depths', 'num_heads', 'window_size', 'image_size')
_SWIN_RULES = {**metadata.RULES, 'num_heads': metadata.COUNTS}
_LAYER, _FOREIGN = 'encoder/layers/', 'encoder.layer.{i}.'
_CLS, _POSITIONS = 'embeddings.cls_token', 'embeddings.position_embeddings'
_DISTILLATION = 'embeddings.distillation_token'
_REGISTERS = 'embeddings.register_tokens'
_MASK = 'embeddings.mask_token'
_PATCHES = 'embeddings.patch_embeddings.projection'
_SCALE = 'layer_scale{}.lambda1'
_VIT_NAMES = {
  'cls': _CLS,
  'position/embedding': _POSITIONS,
  'embedding': _PATCHES,
  **{
    f'{_LAYER}attention/{kind}': f'{_FOREIGN}attention.attention.{kind}'
    for kind in ('query', 'key', 'value')
  },
  f'{_LAYER}attention/out': f'{_FOREIGN}attention.output.dense',
  f'{_LAYER}norm1': f'{_FOREIGN}layernorm_before',
  f'{_LAYER}norm2': f'{_FOREIGN}layernorm_after',
  f'{_LAYER}mlp/fc1': f'{_FOREIGN}intermediate.dense',
  f'{_LAYER}mlp/fc2': f'{_FOREIGN}output.dense',
  f'{_LAYER}scale1': _FOREIGN + _SCALE.format(1),
  f'{_LAYER}scale2': _FOREIGN + _SCALE.format(2),
  'distillation': _DISTILLATION,
  'registers': _REGISTERS,
  'head_distillation': 'distillation_classifier',
  'encoder/norm': 'layernorm',
  'pre_logits': 'pooler.dense',
  'head': 'classifier',
  'pre_norm': 'pre_layrnorm',
  'map/norm': 'head.layernorm',
  **{
    f'map/{path}': f'head.{path.replace("/", ".")}'
    for path in ('probe', 'attention/out', 'mlp/fc1', 'mlp/fc2')
  },
  **{
    f'map/attention/{kind}': Joined('head.attention.in_proj', index, 3)
    for index, kind in enumerate(('query', 'key', 'value'))
  },
}
_VIT_ALIASES = (
  (rf'^({containers.BASES})\.', ''),
  (
    r'^embeddings\.patch_embedding\.',
    'embeddings.patch_embeddings.projection.',
  ),
  (r'^embeddings\.class_embedding$', _CLS),
  (r'^embeddings\.position_embedding\.weight$', _POSITIONS),
  (r'\.self_attn\.out_proj\.', '.attention.output.dense.'),
  (r'\.self_attn\.', '.attention.'),
  (r'\.layer_norm1\.', '.layernorm_before.'),
  (r'\.layer_norm2\.', '.layernorm_after.'),
  (r'^post_layernorm\.', 'layernorm.'),
  (r'^(head\.attention\.in_proj)_', r'\1.'),
  (r'^(head\.attention\.out)_proj', r'\1'),
  (r'^visual_projection\.', 'classifier.'),
  (r'^(encoder\.)?layers?\.', 'encoder.layer.'),
  (r'\.attention\.q_proj\.', '.attention.attention.query.'),
  (r'\.attention\.k_proj\.', '.attention.attention.key.'),
  (r'\.attention\.v_proj\.', '.attention.attention.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
  (r'\.norm1\.', '.layernorm_before.'),
  (r'\.norm2\.', '.layernorm_after.'),
  (r'^(encoder.*)\.mlp\.(fc1|weights_in)\.', r'\1.intermediate.dense.'),
  (r'^(encoder.*)\.mlp\.(fc2|weights_out)\.', r'\1.output.dense.'),
  (r'^cls_classifier\.', 'classifier.'),
)
# Arrays that the model does not use: mask tokens, text towers, MAE's decoder.
_LEFT_OUT = (
  r'embeddings\.(mask_token|position_ids)|decoder\.|text_(model|projection)\.|'
  r'logit_(scale|bias)'
)
_SWIN_NAMES = {
  'embedding': _PATCHES,
  'embedding_norm': 'embeddings.norm',
  'norm': 'layernorm',
  'head': 'classifier',
}
_SWIN_BLOCK = {
  'norm1': 'layernorm_before',
  'norm2': 'layernorm_after',
  **{
    f'attention/{kind}': f'attention.self.{kind}'
    for kind in ('query', 'key', 'value')
  },
  'attention/bias_table': 'attention.self.relative_position_bias_table',
  'attention/out': 'attention.output.dense',
  'mlp/fc1': 'intermediate.dense',
  'mlp/fc2': 'output.dense',
}
_SWIN_ALIASES = (
  (r'^swin\.', ''),
  (r'\.attention\.q_proj\.', '.attention.self.query.'),
  (r'\.attention\.k_proj\.', '.attention.self.key.'),
  (r'\.attention\.v_proj\.', '.attention.self.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
  (r'\.attention\.relative_position_bias\.', '.attention.self.'),
  (r'\.mlp\.fc1\.', '.intermediate.dense.'),
  (r'\.mlp\.fc2\.', '.output.dense.'),
)
# Constants of the model; other values in a config are an error.
_SWIN_FIXED = {
  'patch_size': PATCH_SIZE,
  'mlp_ratio': float(MLP_RATIO),
  'qkv_bias': True,
  'use_absolute_embeddings': False,
}
# Types whose positions the library interpolates with antialiasing.
_ANTIALIASED = {
  'dinov2_with_registers': 'bicubic',
  'siglip2_vision_model': 'bilinear',
}
_KERNEL = f'{_PATCHES}.weight'
_LAYER_SCALE = 1e-5  # an initial value, which loaded weights replace


def load(path: str, head: dict[str, Any] | None = None) -> Pretrained:
  """Describes the weights in a directory with one or several weight files.

  Args:
    path: path of the directory, or of a weight file in it.
    head: result of `tensors.read_config`, if it is known.

  Raises:
    UserError: the directory cannot be read, is damaged, or contains a type of
      model that is not supported.
  """
  folder = tensors.folder_of(path)
  file = folder / 'config.json'
  config = (tensors.read_config(path) if head is None else head) or {}
  kind = config.get('model_type')
  if 'vision_config' in config:  # a model of images and texts
    kind = f'{kind}_vision_model'
    config = {**config, **metadata.validated(file, config['vision_config'])}
  rules = _SWIN_RULES if kind == 'swin' else metadata.RULES
  metadata.validated(file, {'model_type': kind})
  if kind not in TYPES:
    raise UserError(
      f'{path} contains a model of the type {kind!r}; supported types: '
      f'{", ".join(TYPES)}.'
    )
  given = {k: v for k, v in config.items() if v is not None}
  config = {**TYPES[kind].defaults, **given}
  config = metadata.validated(file, config, TYPES[kind].required, rules)
  arrays, _ = tensors.read(path)
  return containers.described(
    path, arrays, lambda model: _described(path, model, kind, config)
  )


def _described(
  path: str, arrays: Arrays, kind: str, config: dict[str, Any]
) -> Pretrained:
  """Describes a model of a type, given its arrays and its config."""
  parsed = TYPES[kind].parse(path, arrays, config | {'model_type': kind})
  folder = tensors.folder_of(path)
  file = folder / 'preprocessor_config.json'
  stored = metadata.validated(file, metadata.read(file))
  values = stored or processor.DEFAULTS[kind]
  mean, std = processor.statistics(values)
  names = config.get('id2label', {})
  properties = parsed.metadata.updated(
    known_from='config.json and '
    + ('preprocessor_config.json' if stored else "the library's defaults"),
    gelu=metadata.GELUS[config.get('hidden_act', 'gelu')],
    norm_eps=config.get('layer_norm_eps', 1e-12),
    mean=mean,
    std=std,
    preprocess=processor.read(values),
    class_names=[names[key] for key in sorted(names, key=int)],
  )
  return foreign.imported(path, parsed._replace(metadata=properties))


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a directory that transformers can load offline.

  Args:
    path: path of the directory, which must not exist.
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`.

  Raises:
    UserError: the directory exists, or transformers has no equivalent model.
  """
  folder = paths.locate(path)
  if folder.exists():
    raise UserError(f'{path} exists: give a new directory.')
  model = foreign.opened_model(about)
  properties = ModelMetadata.of(model, about)
  if swin.is_swin(tree.flatten(params)):
    written = _written_swin(model)
  elif getattr(model.config, 'rotary', None) == 'centered':
    written = _written_dinov3(model)
  else:
    written = _written_vit(model)
  exported = foreign.exported(
    params, about, written.names, written.positions, written.supported
  )
  if written.kind == 'swin':
    _check_windows(model, exported)
  elif written.kind == 'dinov3_vit':
    exported = dinov3.completed(model, exported)
  else:
    exported = _completed(model, written.kind, exported)
  height, width = properties.image_size
  ending = 'ForImageClassification' if model.num_classes else 'Model'
  if getattr(model, 'distilled', False):
    ending += 'WithTeacher'
  config: dict[str, Any] = dict(
    model_type=written.kind,
    architectures=[TYPES[written.kind].class_name + ending],
    image_size=height if height == width else [height, width],
    num_channels=3,
    **written.config,
  )
  if model.num_classes:
    exported = {
      name if 'classifier' in name else f'{written.kind}.{name}': array
      for name, array in exported.items()
    }
    labels = dict(enumerate(properties.class_names))
    config['id2label'] = {str(i): name for i, name in labels.items()}
    config['label2id'] = {name: i for i, name in labels.items()}
  files = {
    'config.json': config,
    'preprocessor_config.json': processor.written(properties),
  }
  try:
    with paths.new_folder(folder) as unfinished:
      for name, content in files.items():
        (unfinished / name).write_text(json.dumps(content, indent=2))
      tensors.write(os.fspath(unfinished / 'model.safetensors'), exported, {})
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error


class _Written(NamedTuple):
  """A model as transformers describes it.

  Attributes:
    kind: `model_type`.
    names: names of the parameters in files.
    config: sizes and options in config.json.
    positions: kinds of positions that it may have.
    supported: rare options that it may have, see `foreign.native_params`.
  """

  kind: str
  names: NameMap
  config: dict[str, Any]
  positions: tuple[str, ...] = ('learned',)
  supported: tuple[str, ...] = ()


def _written_dinov3(model: Any) -> _Written:
  """Returns the names and the config of a DINOv3.

  Raises:
    UserError: transformers has no equivalent model.
  """
  return _Written(
    'dinov3_vit',
    dinov3.NAMES,
    dinov3.written_config(model),
    dinov3.POSITIONS,
    dinov3.SUPPORTED,
  )


def _parse_vit(
  path: str, arrays: Arrays, config: Mapping[str, Any]
) -> ParsedWeights:
  """Parses a Vision Transformer.

  Raises:
    UserError: the config contradicts the arrays.
  """
  arrays = _used(path, arrays)
  if config['model_type'] in _TOWERS:
    arrays = _tower(path, arrays)
    side = math.isqrt(arrays[_POSITIONS].shape[1]) * arrays[_KERNEL].shape[-1]
    config = {**config, 'image_size': side}
  if 'distillation_classifier.weight' not in arrays and _DISTILLATION in arrays:
    # A token whose output is not used is a register.
    arrays[_REGISTERS] = arrays.pop(_DISTILLATION)
    has_positions = True
  else:  # registers of DINOv2
    has_positions = _REGISTERS not in arrays
  names = NameMap(_VIT_NAMES)
  model = vit.section(path, arrays, names, 'a Vision Transformer')
  model['num_heads'] = config['num_attention_heads']
  head = arrays.get('classifier.weight')
  if head is not None and head.shape[-1] == 2 * model['width']:
    model['pool'] = 'token_gap'
  size, patch = metadata.pair(config['image_size']), model['patch_size']
  for key, value in (
    ('hidden_size', model['width']),
    ('num_hidden_layers', model['depth']),
    ('patch_size', patch),
    ('image_size', config['image_size'] if min(size) >= patch else f'≥{patch}'),
  ):
    if config.get(key, value) != value:
      raise UserError(
        f'config.json of {path}: {key} is {config[key]!r}, but its arrays are '
        f'those of {value}. Fetch all files of one version again.'
      )
  if not has_positions:
    model['prefix_positions'] = False
    arrays = foreign.without_class_position(arrays, _CLS, _POSITIONS)
  if 'layer_scale' in model:
    model['layer_scale'] = _LAYER_SCALE
  method = _ANTIALIASED.get(config['model_type'], 'bicubic_no_antialias')
  properties = ModelMetadata(size, position_resize=method)
  return ParsedWeights(arrays, names, model, properties)


def _used(path: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
  """Returns the arrays that are used, with the names in files."""
  renamed = names_lib.renamed(arrays, _VIT_ALIASES)
  result = {k: v for k, v in renamed.items() if not re.match(_LEFT_OUT, k)}
  if len(result) < len(renamed):
    unused = [name for name in renamed if name not in result]
    log.info('%s: left out %s, …', path, ', '.join(unused[:3]))
  for name in (_CLS, _POSITIONS):  # one dimension fewer in CLIP and SigLIP
    if name in result:
      result[name] = np.array(result[name], ndmin=3)
  width = result.get('layernorm.weight', np.zeros(0)).shape[0]
  head = result.get('classifier.weight')
  if head is not None and not np.any(head[:, width:]):
    result['classifier.weight'] = head[:, :width]  # padded by `_completed`
  return result


def _tower(path: str, arrays: Arrays) -> Arrays:
  """Returns the arrays of an image tower, completed by zeros.

  A projection is the head of the model, and has no bias.
  """
  kernel = arrays[_KERNEL]
  width = len(kernel)
  if kernel.ndim == 2:  # NaFlex: [d, p * p * 3]
    side = math.isqrt(kernel.shape[1] // RGB)
    kernel = kernel.reshape(width, side, side, -1).transpose(0, 3, 1, 2)
  arrays = {f'{_PATCHES}.bias': np.zeros(width, np.float32)} | arrays
  arrays[_KERNEL] = kernel
  if 'classifier.bias' in arrays:
    unused = 'head.'  # the classifier's input is the mean of the patches,
    if _CLS in arrays:  # in CLIP without the last LayerNorm
      unused = 'classifier.'
      log.warning('%s: left out its classifier, which the vit lacks', path)
    arrays = {k: v for k, v in arrays.items() if not k.startswith(unused)}
  elif 'classifier.weight' in arrays:
    outputs = len(arrays['classifier.weight'])
    arrays['classifier.bias'] = np.zeros(outputs, np.float32)
  return arrays


def _written_vit(model: Any) -> _Written:
  """Returns the names and the config of a Vision Transformer.

  Raises:
    UserError: transformers has no equivalent type; the message lists the
      options that it lacks.
  """
  if not isinstance(model, ViT):
    raise UserError(
      f"a {type(model).__name__} cannot be written with Hugging Face's names, "
      'only Vision Transformers and Swins. Write a directory of vit_jax.'
    )
  names = dict(_VIT_NAMES)
  kind, supported = 'vit', ()
  is_joined = model.pool == 'token_gap'
  if model.distilled:
    kind, supported = 'deit', ('distilled',)
    names['head'] = 'cls_classifier'
  elif _is_deit(model):
    kind, supported = 'deit', ('registers',)
    names['registers'] = _DISTILLATION
  elif model.registers:
    kind = 'dinov2_with_registers'
    supported = ('registers', 'layer_scale', 'gated')
  elif model.layer_scale is not None or model.gated or is_joined:
    kind, supported = 'dinov2', ('layer_scale', 'gated')
  options = ('distilled', 'registers', 'layer_scale', 'gated', 'qk_norm')
  options += ('pre_norm',)
  unsupported = [
    name
    for name in options
    if name not in supported and getattr(model, name) not in (None, 0, False)
  ]
  if model.pool != 'token' and not (is_joined and kind.startswith('dinov2')):
    unsupported.append(f'pool {model.pool!r}')
  if model.pre_logits and (model.num_classes or kind != 'vit'):
    unsupported.append('pre-logits before the head')
  if model.distilled and not model.num_classes:
    unsupported.append('distillation token without a head')
  config = dict(
    patch_size=model.patch_size,
    hidden_size=model.width,
    num_hidden_layers=model.depth,
    num_attention_heads=model.num_heads,
    hidden_act=metadata.ACTIVATION_NAMES[model.gelu],
    layer_norm_eps=model.norm_eps,
    qkv_bias=True,
  )
  if kind in ('vit', 'deit'):
    config |= dict(
      intermediate_size=model.mlp_dim,
      pooler_act='tanh',
      pooler_output_size=model.width,
    )
  else:
    mlp = ('weights_in', 'weights_out') if model.gated else ('fc1', 'fc2')
    names |= {
      f'{_LAYER}norm1': f'{_FOREIGN}norm1',
      f'{_LAYER}norm2': f'{_FOREIGN}norm2',
      f'{_LAYER}mlp/fc1': f'{_FOREIGN}mlp.{mlp[0]}',
      f'{_LAYER}mlp/fc2': f'{_FOREIGN}mlp.{mlp[1]}',
    }
    ratio = round(model.mlp_dim * (1.5 if model.gated else 1) / model.width)
    units = ratio * model.width
    if model.gated:  # two thirds, rounded up to a multiple of 8
      units = (units * 2 // 3 + 7) // 8 * 8
    if units != model.mlp_dim:
      unsupported.append(
        f'MLP of {model.mlp_dim} units for a width of {model.width}'
      )
    config |= dict(
      mlp_ratio=ratio,
      use_swiglu_ffn=model.gated,
      layerscale_value=1.0 if model.layer_scale is None else model.layer_scale,
    )
    if model.registers:
      config['num_register_tokens'] = model.registers
  if unsupported:
    raise UserError(
      f"Hugging Face's {TYPES[kind].class_name} has no "
      f'{", ".join(unsupported)}, but this model has: it cannot be written as '
      'such a directory. A directory of vit_jax can contain every model.'
    )
  return _Written(kind, NameMap(names), config)


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


def _completed(model: Any, kind: str, arrays: Arrays) -> Arrays:
  """Adds the arrays that the type of a model requires in transformers.

  The additional arrays (positions, LayerScale, half of a head) are zeros or
  ones, which have no effect in the model.
  """
  width, table = model.width, np.asarray(arrays[_POSITIONS])
  if not model.prefix_positions:  # the class token requires a position
    table = np.pad(table, ((0, 0), (1 + model.distilled, 0), (0, 0)))
  elif kind == 'dinov2_with_registers':
    # Registers have no positions in transformers: ours are added to the tokens.
    cls, positions, patches = np.split(table, [1, 1 + model.registers], axis=1)
    arrays = arrays | {_REGISTERS: arrays[_REGISTERS] + positions}
    table = np.concatenate([cls, patches], axis=1)
  arrays = arrays | {_POSITIONS: table}
  if kind in ('vit', 'deit'):
    return arrays
  arrays[_MASK] = np.zeros((1, width), np.float32)
  for i in range(model.depth if model.layer_scale is None else 0):
    for j in (1, 2):
      name = (_FOREIGN + _SCALE.format(j)).format(i=i)
      arrays[name] = np.ones(width, np.float32)
  # The input of the head in transformers includes the mean of the patches.
  if model.num_classes and model.pool == 'token':
    head = arrays['classifier.weight']
    arrays['classifier.weight'] = np.pad(head, ((0, 0), (0, width)))
  return arrays


def _parse_swin(
  path: str, arrays: Arrays, config: Mapping[str, Any]
) -> ParsedWeights:
  """Parses a Swin.

  Raises:
    UserError: the config describes a Swin that is not supported.
  """
  heads, depths = list(config['num_heads']), tuple(config['depths'])
  expected = _SWIN_FIXED | {
    'num_heads': [heads[0] * 2**i for i in range(len(depths))]
    if heads
    else 'one for each stage'
  }
  other = {k: config[k] for k, v in expected.items() if config.get(k, v) != v}
  if other:
    allowed = {key: expected[key] for key in other}
    raise UserError(
      f'config.json of {path} has {other}; the model swin supports {allowed}.'
    )
  model = dict(
    name='swin',
    width=config['embed_dim'],
    depths=depths,
    num_heads=heads[0],
    window_size=config['window_size'],
  )
  used = {
    name: array
    for name, array in names_lib.renamed(arrays, _SWIN_ALIASES).items()
    if not name.endswith('.relative_position_index')  # follows from the sizes
  }
  properties = ModelMetadata(
    metadata.pair(config['image_size']), position_resize='bicubic_no_antialias'
  )
  names = _swin_names(len(depths))
  return ParsedWeights(used, names, model, properties, swin.CONSTANTS)


def _swin_names(stages: int) -> NameMap:
  """Returns the names of a Swin's parameters in files."""
  return swin.stacked_names(
    _SWIN_NAMES, _SWIN_BLOCK, 'encoder.layers.', stages, merging_of=-1
  )


def _written_swin(model: Any) -> _Written:
  """Returns the names and the config of a Swin."""
  if model.window_rule != 'authors':
    log.warning(
      "model.window_rule=%r is not stored: Hugging Face's Swin uses the rule "
      "'authors', with other results at image sizes that windows do not fill",
      model.window_rule,
    )
  stages = len(model.depths)
  config = _SWIN_FIXED | dict(
    embed_dim=model.width,
    depths=list(model.depths),
    num_heads=[model.num_heads * 2**i for i in range(stages)],
    window_size=model.window_size,
    hidden_act='gelu',
    layer_norm_eps=model.norm_eps,
    drop_path_rate=model.drop_path,
  )
  return _Written('swin', _swin_names(stages), config)


def _check_windows(model: Any, arrays: Arrays) -> None:
  """Checks that the windows of all stages of a Swin have the same size.

  Raises:
    UserError: a stage has smaller windows than the config, because its map is
      small.
  """
  for name, array in arrays.items():
    if name.endswith('relative_position_bias_table'):
      window = window_of(len(array))
      if window != model.window_size:
        raise UserError(
          f"Hugging Face's Swin needs windows of {model.window_size} tokens in "
          f'all stages, but {name} has {window}: write .safetensors instead.'
        )


class _Type(NamedTuple):
  """A type of models in transformers.

  Attributes:
    class_name: prefix of the names of its classes.
    required: required keys of config.json.
    parse: function from path, arrays and config to the parsed weights.
    defaults: values of keys that are often left out in config.json.
  """

  class_name: str
  required: tuple[str, ...]
  parse: Callable[[str, Arrays, Mapping[str, Any]], ParsedWeights]
  defaults: Mapping[str, Any] = {}


_SIGLIP = dict(
  num_attention_heads=12, hidden_act='gelu_pytorch_tanh', layer_norm_eps=1e-6
)
_CLIP = dict(
  num_attention_heads=12, hidden_act='quick_gelu', layer_norm_eps=1e-5
)
# {type: (prefix of the library's classes, defaults)}
_VITS = {
  'vit': ('ViT', {}),
  'deit': ('DeiT', {}),
  'dinov2': ('Dinov2', {}),
  'dinov2_with_registers': ('Dinov2WithRegisters', {}),
  'vit_mae': ('ViTMAE', {}),
  'vit_msn': ('ViTMSN', {'layer_norm_eps': 1e-6}),
  'ijepa': ('IJepa', {}),
}
_TOWERS = {
  'clip_vision_model': ('CLIPVision', _CLIP),
  'siglip_vision_model': ('SiglipVision', _SIGLIP),
  'siglip2_vision_model': ('Siglip2Vision', _SIGLIP),
}
TYPES = {
  **{k: _Type(v[0], _VIT_KEYS, _parse_vit, v[1]) for k, v in _VITS.items()},
  **{k: _Type(v[0], (), _parse_vit, v[1]) for k, v in _TOWERS.items()},
  'dinov3_vit': _Type(
    'DINOv3ViT', _VIT_KEYS, dinov3.parse, {'layer_norm_eps': 1e-5}
  ),
  'swin': _Type('Swin', _SWIN_KEYS, _parse_swin),
}
# Types that `save` writes.
WRITTEN = (
  'vit',
  'deit',
  'dinov2',
  'dinov2_with_registers',
  'dinov3_vit',
  'swin',
)
