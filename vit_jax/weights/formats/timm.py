"""Weights with timm's names: `.safetensors`, and PyTorch's `.pth`.

The repositories of DeiT, MAE and DINO also use these names, or older ones.
Settings that the arrays do not determine are those of the first source that
exists:

1. the notes that `save` writes into a file
2. the `config.json` next to the file (as on the Hugging Face hub) and the table
   of timm's architectures
3. the defaults of a family, which is recognized by the name of the file or by
   its arrays (`timm_models.FAMILIES`)
"""

import dataclasses
import functools
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError, check_choice
from vit_jax.models.layers import EPSILON
from vit_jax.models.swin import Swin
from vit_jax.weights import foreign, metadata
from vit_jax.weights import names as names_lib
from vit_jax.weights.contract import Pretrained, SeveralModels
from vit_jax.weights.description import Description
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import (
  containers,
  swin,
  tensors,
  timm_layouts,
  timm_models,
  vit,
)
from vit_jax.weights.formats.timm_models import Architecture
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import NameMap

log = logging.getLogger('vit_jax')
PyTree = Any
_NOTES = 'vit_jax'  # key of the notes in the metadata of a file
_LAYER = 'encoder/layers/'
NAMES = NameMap(names_lib.table('timm'))
# Names of models without a bias of the keys
_WITHOUT_KEY_BIAS = NameMap(
  {
    **NAMES.names,
    f'{_LAYER}attention/query/bias': 'blocks.{i}.attn.q_bias',
    f'{_LAYER}attention/value/bias': 'blocks.{i}.attn.v_bias',
  }
)
_KIND = "a Vision Transformer with timm's names"
_PATCH_BIAS = 'patch_embed.proj.bias'
_TORCH_EPSILON = 1e-5  # PyTorch's default
# Size of images of DINOv3, whose arrays do not depend on it
_DINOV3_SIZE = (256, 256)
# (pattern, replacement) for names in repositories whose weights timm converts.
_ALIASES = (
  (r'^blocks\.\d+\.(\d+)\.', r'blocks.\1.'),  # chunks for FSDP
  (r'^(blocks\.\d+\.)gamma_([12])$', r'\1ls\2.gamma'),
  (r'^(register|storage)_tokens$', 'reg_token'),
  (r'^(blocks\.\d+\.mlp\.)w12\.', r'\1fc1.'),
  (r'^(blocks\.\d+\.mlp\.)w1\.', r'\1fc1_g.'),
  (r'^(blocks\.\d+\.mlp\.)w2\.', r'\1fc1_x.'),
  (r'^(blocks\.\d+\.mlp\.)w3\.', r'\1fc2.'),
  (r'^(blocks\.\d+\.mlp\.)ffn_ln\.', r'\1norm.'),
  (r'^(blocks\.\d+\.attn\.)inner_attn_ln\.', r'\1norm.'),
)
# Name that occurs in all models of transformers
_HUGGING_FACE = r'(^|\.)embeddings\.patch_embeddings?\.'
# {description: pattern} of arrays that an encoder does not use.
_OTHER_HEAD = 'a head that is not a single matrix, and has to be replaced'
_LEFT_OUT = {
  'parts of DINO or DINOv3': r'(\w+_)?head\.(mlp|last_layer)\b|local_cls_norm',
  _OTHER_HEAD: r'head\.(?!(weight|bias)$)',
}


@dataclasses.dataclass(frozen=True)
class _Settings:
  """Settings next to a file that determine its model.

  Attributes:
    args: timm's `model_args`.
    image_size: (height, width), pixels; None if unknown.
    pool: timm's `global_pool`; None if unknown.
    architecture: architecture that is specified by the config, the user or the
      name of the file.
    is_noted: whether they are notes of this package, which also contain what
      other settings do not.
  """

  args: Mapping[str, Any]
  image_size: tuple[int, int] | None
  pool: str | None = None
  architecture: Architecture | None = None
  is_noted: bool = False

  def fitting(self, model: Mapping[str, Any]) -> Architecture | None:
    """Returns the architecture if it has the width and depth of a model.

    A config may contain the name of an architecture with other sizes.
    """
    found = self.architecture
    sizes = model['width'], model['depth']
    return found if found and (found.width, found.depth) == sizes else None


def load(
  path: str, head: dict[str, Any] | None = None
) -> Pretrained | SeveralModels:
  """Describes the weights in a file, or in a folder with a config.json.

  Args:
    path: path of the file or folder, or ARCHITECTURE:PATH with timm's name of
      the architecture, for files without a config.json that contains the name.
    head: result of `tensors.read_config`, if it is known.

  Raises:
    UserError: the file cannot be read, contains pickled code, or contains
      neither a Vision Transformer nor a Swin; or timm has no such architecture.
  """
  path, architecture = _split(path)
  config = (tensors.read_config(path) if head is None else head) or {}
  arrays, notes = tensors.read(path)
  if _NOTES in notes:
    # Notes contain all settings, so other sources are not needed.
    where = f'the metadata of {path}'
    content = metadata.parse(where, notes[_NOTES])
    values = metadata.read_notes(where, content, required=('image_size',))
    return foreign.imported(path, _parse_noted(path, arrays, values))
  return containers.described(
    path, arrays, lambda model: _described(path, model, config, architecture)
  )


def _described(
  path: str,
  arrays: Mapping[str, np.ndarray],
  config: dict[str, Any],
  architecture: Architecture | None,
) -> Pretrained:
  """Describes a model; see `load`."""
  original, arrays = arrays, timm_layouts.with_timm_names(arrays)
  if any(re.search(_HUGGING_FACE, name) for name in arrays):
    raise UserError(
      f"{path} has the names of Hugging Face's transformers, and needs their "
      'config.json, which describes the model: fetch it into the same folder.'
    )
  if 'architecture' not in config:
    config = {}  # of another program
  is_swin = swin.is_swin(arrays)
  settings = metadata.SWIN_SETTINGS if is_swin else metadata.SETTINGS
  file = f'config.json of {path}'
  config = metadata.validated(file, config, settings=settings)
  name = config.get('architecture')
  stem = os.path.splitext(os.path.basename(path))[0]
  architecture = architecture or timm_models.find(name or stem)
  # Other models may have parameters of the same names.
  shown = architecture.name if architecture else name or ''
  if reason := timm_models.refusal(shown):
    raise UserError(
      f'{path} has the architecture {shown}, which is not supported: {reason}. '
      'Use another one.'
    )
  args = config.get('model_args', {})
  size = config.get('pretrained_cfg', {}).get('input_size')
  known = _Settings(
    args,
    (size[1], size[2]) if size else None,
    args.get('global_pool') or config.get('global_pool'),
    architecture,
  )
  parsed = _parse(path, arrays, known)
  size = parsed.metadata.image_size
  values = (
    _configured(path, config, architecture, size)
    if name or architecture
    else timm_models.family_settings(path, {**original, **arrays}, size)
  )
  parsed = parsed._replace(metadata=parsed.metadata.updated(**values))
  # The authors' models with 'visualize' in their name predict plain pixels.
  norm_pixels = 'visualize' not in path.rpartition('/')[2]
  parsed = vit.with_decoder(path, parsed, norm_pixels=norm_pixels)
  _warn_of_assumptions(path, parsed, known)
  return foreign.imported(path, parsed)


def _split(path: str) -> tuple[str, Architecture | None]:
  """Splits [ARCHITECTURE:]PATH into the path and the architecture, or None.

  Raises:
    UserError: timm has no architecture of that name.
  """
  match = re.match(r'([\w.]+):(?!//)(.+)', path)
  if match is None:
    return path, None
  names = {name.partition('.')[0] for name in timm_models.table()}
  name, place = match[1].partition('.')[0], timm_models.source()
  check_choice(
    f'the architecture in {path}, according to {place},', name, names
  )
  return match[2], timm_models.find(match[1])


def _parse_noted(
  path: str, arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any]
) -> ParsedWeights:
  """Parses a file with the notes of `save`.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
    notes: result of `metadata.read_notes`.
  """
  # Weights of this package, unless the notes contain another method.
  values = {'position_resize': None, **notes}
  noted = values.pop('model_args', {})
  # Older notes do not contain the rule of windows, which was that of the
  # authors.
  args = {'window_rule': 'authors', **noted}
  settings = _Settings(args, values['image_size'], is_noted=True)
  parsed = _parse(path, arrays, settings)
  values['known_from'] = 'the notes in the file'
  properties = dataclasses.replace(parsed.metadata, **values)
  return parsed._replace(metadata=properties, noted=noted)


def _configured(
  path: str,
  config: Mapping[str, Any],
  architecture: Architecture | None,
  image_size: tuple[int, int],
) -> dict[str, Any]:
  """Returns the settings in config.json, and those in the table for others."""
  stored = config.get('pretrained_cfg', {})
  names = stored.get('label_names') or config.get('label_names') or ()
  values: dict[str, Any] = {'known_from': 'config.json', 'class_names': names}
  evaluation: dict[str, Any] = {
    'crop_pct': 0.9,
    'interpolation': 'bicubic',
    'crop_mode': 'center',
  }
  if architecture is not None:
    values['known_from'] = (
      f'{architecture.name} in {timm_models.source()} and any config.json'
    )
    values['mean'], values['std'] = architecture.statistics
    values['gelu'] = architecture.gelu
    values['norm_eps'] = architecture.norm_eps
    # For keys that a pretrained_cfg does not contain, timm uses its general
    # defaults, not those of the architecture.
    if not stored:
      evaluation = {key: getattr(architecture, key) for key in evaluation}
  elif 'quickgelu' in config['architecture']:
    values['gelu'] = 'quick'
  activation = config.get('model_args', {}).get('act_layer')
  if activation is not None:
    values['gelu'] = metadata.GELUS[activation]
  values |= {key: stored[key] for key in ('mean', 'std') if key in stored}
  evaluation |= {key: stored[key] for key in evaluation if key in stored}
  values['preprocess'] = timm_models.preprocess(image_size, **evaluation)
  return values


def _warn_of_assumptions(
  path: str, parsed: ParsedWeights, settings: _Settings
) -> None:
  """Warns if arrays and settings do not determine the whole model."""
  model = parsed.model
  is_determined = settings.architecture and 'num_heads' in settings.args
  # The arrays of a Swin determine its heads and windows, those of a DINOv3 the
  # heads.
  if model.get('name') == 'swin' or model.get('rope') == 'centered':
    return
  if settings.fitting(model) or is_determined:
    return
  log.warning(
    '%s does not name an architecture of timm with its sizes; assumed: '
    'num_heads %d, gelu %s, pool %s, images of %dx%d pixels and no rotary '
    'position embeddings. Name '
    'the architecture: timm:ARCHITECTURE:PATH, or override single values by '
    'load_pretrained(…, num_heads=…, gelu=…)',
    path,
    model['num_heads'],
    parsed.metadata.gelu,
    'gap' if 'fc_norm' in model else model['pool'],
    *parsed.metadata.image_size,
  )


def _parse(
  path: str, arrays: Mapping[str, np.ndarray], settings: _Settings
) -> ParsedWeights:
  """Parses a file, given its arrays and settings.

  Raises:
    UserError: the arrays are not those of a Vision Transformer or a Swin, or
      contradict the settings.
  """
  if swin.is_swin(arrays):
    return swin.parse(path, arrays, settings.args, settings.image_size)
  named = settings.architecture
  arrays, rotations = _encoder_arrays(path, arrays, named)
  has_key_bias = 'blocks.0.attn.q_bias' not in arrays
  names = NAMES if has_key_bias else _WITHOUT_KEY_BIAS
  model = vit.section(path, arrays, names, _KIND) | rotations
  if 'pos_embed' not in arrays:
    if not rotations and not settings.is_noted:
      raise UserError(
        f'{path} has no pos_embed, and its arrays do not show which rotary '
        'positions the model has instead: name its architecture, as in '
        'timm:ARCHITECTURE:PATH.'
      )
    model['position'] = 'none'
  _add_options(path, model, settings)
  order = 'columns' if model.get('rope') == 'mixed' else 'halves'
  if named is not None:
    order = named.rope_order
  if order != 'halves':
    arrays = timm_layouts.planes_apart(
      arrays, model['num_heads'], model['rope'], order == 'columns'
    )
  arrays, properties = _with_positions(path, arrays, model, settings)
  return ParsedWeights(arrays, names, model, properties)


def _encoder_arrays(
  path: str,
  arrays: Mapping[str, np.ndarray],
  architecture: Architecture | None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns the arrays that an encoder uses, with timm's names, and rotations.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
    architecture: architecture of the weights, if it is known.

  Returns:
    Arrays with joined matrices, and the keys of the model for rotations.
  """
  result = names_lib.renamed(arrays, _ALIASES)
  for what, pattern in _LEFT_OUT.items():
    unused = [name for name in result if re.match(pattern, name)]
    if unused:
      level = logging.WARNING if what == _OTHER_HEAD else logging.INFO
      log.log(level, '%s: left out %s, %d arrays', path, what, len(unused))
    for name in unused:
      del result[name]
  if 'norm_pre.weight' in result:  # CLIP's patch embedding has no bias
    width = result['norm_pre.weight'].shape
    result.setdefault(_PATCH_BIAS, np.zeros(width, np.float32))
  rotations = timm_layouts.rotations(result, architecture)
  return timm_layouts.joined(result), rotations


def _add_options(path: str, model: dict[str, Any], settings: _Settings) -> None:
  """Adds the keys of a model that its arrays do not determine.

  Args:
    path: path of the file, for messages.
    model: keys that the arrays determine.
    settings: settings of the file.

  Raises:
    UserError: the arrays are those of another pooling than the settings.
  """
  named, architecture = settings.architecture, settings.fitting(model)
  pool = _set_pool(
    path, model, settings.pool or getattr(architecture, 'pool', None)
  )
  if named is not None:
    model['final_norm'] = bool(named.final_norm)
    model['post_norm'] = 'Post' in named.block
    if pool == 'map':
      model['map_heads'] = named.map_heads or None
      model['map_prefix'] = bool(named.map_prefix)
  model['num_heads'] = (
    settings.args.get('num_heads')
    or model.get('num_heads')
    or (architecture and architecture.num_heads)
    or timm_models.num_heads(
      model['width'], model['depth'], {'gap': 'avg'}.get(pool, pool)
    )
  )


def _set_pool(path: str, model: dict[str, Any], specified: str | None) -> str:
  """Sets the pooling in the model's section, and returns it.

  Args:
    path: path of the file, for messages.
    model: keys that the arrays determine.
    specified: timm's `global_pool` according to the settings; None if unknown.

  Raises:
    UserError: the arrays are those of another pooling.
  """
  pool, fc_norm = model['pool'], 'fc_norm' in model
  shown = 'gap' if fc_norm else pool
  wanted = 'gap' if specified == 'avg' else specified or shown
  if wanted == shown:
    return shown
  if wanted not in ('gap', 'max', 'avgmax') or pool == 'map':
    raise UserError(
      f'the settings of {path} specify the pooling {specified!r}, but its '
      f'arrays are those of {shown!r}: correct the settings.'
    )
  if pool == 'token':
    model['class_token'] = True
  model['pool'] = wanted
  return wanted


def _with_positions(
  path: str,
  arrays: dict[str, np.ndarray],
  model: dict[str, Any],
  settings: _Settings,
) -> tuple[dict[str, np.ndarray], ModelMetadata]:
  """Returns the arrays with converted positions, and the file's metadata.

  Depending on the source, there are positions for all tokens, only for the
  patches, or (in DINOv2's repository) for the patches and the class token. In
  the last case, the position of the class token is added to the token.

  Args:
    path: path of the file, for messages.
    arrays: arrays with timm's names.
    model: keys of the model; `prefix_positions` is added if it is False.
    settings: settings of the file.

  Raises:
    UserError: in none of these cases does the number of positions fit a square
      of patches or the image size in the settings.
  """
  from_torch = 'pre_norm' in model or model.get('rope') == 'centered'
  specified, named = settings.image_size, settings.architecture
  properties = ModelMetadata(
    specified or (named.size if named else _DINOV3_SIZE),
    norm_eps=_TORCH_EPSILON if from_torch else EPSILON,
    position_resize='bicubic',
  )
  if 'pos_embed' not in arrays:
    return arrays, properties
  shape = names_lib.shape_of(path, arrays, 'pos_embed', 3, _KIND)
  count, patch_size = shape[1], model['patch_size']
  cls = int('cls_token' in arrays)
  prefix = cls + model.get('distilled', 0) + model.get('registers', 0)
  height, width = specified or (0, 0)
  wanted = (height // patch_size, width // patch_size)
  for others in dict.fromkeys((prefix, 0, cls)):  # tokens other than patches
    side = math.isqrt(max(count - others, 0))
    square = (side, side)
    grid = wanted if math.prod(wanted) == count - others else square
    if side and math.prod(grid) == count - others:
      break
  else:
    raise UserError(
      f'{path}: {count} positions are not a square of patches, with or without '
      f'{prefix} other tokens; set input_size in a config.json next to it.'
    )
  if others != prefix:
    model['prefix_positions'] = False
    if others:
      names = 'cls_token', 'pos_embed'
      arrays = foreign.without_class_position(arrays, *names)
  size = (grid[0] * patch_size, grid[1] * patch_size)
  # A square of patches can be a grid that is not square, also one that has
  # positions of the other tokens.
  is_known = size in (specified, named.size if named else None)
  return arrays, dataclasses.replace(
    properties,
    image_size=size,
    other_patches=None if is_known else count - prefix,
  )


def save(path: str, params: PyTree, description: Description) -> None:
  """Writes a `.safetensors` file with timm's names.

  Settings that the arrays do not determine are written into the metadata in the
  file's header.

  Args:
    path: path of the file, local or gs://.
    params: parameters of the objective that is described.
    description: what the weights are.

  Raises:
    UserError: timm has no name for a parameter.
    OSError: a file cannot be written.
  """
  if not path.endswith('.safetensors'):
    raise UserError(
      f"{path}: weights with timm's names are .safetensors files; give a path "
      'with that ending.'
    )
  model = description.built_model
  names, stored = NAMES, ('num_heads',)
  if isinstance(model, Swin):
    names, stored = (
      swin.names(len(model.depths)),
      ('window_size', 'window_rule'),
    )
  elif getattr(model, 'qkv_bias', 'all') == 'query_value':
    names = _WITHOUT_KEY_BIAS
  arrays = foreign.exported(params, description, names)
  if getattr(model.config, 'rotary', None):
    raise names_lib.not_writable(
      'rotations, because timm orders the channels of heads in another way'
    )
  # The patch embedding of CLIP has no bias in timm. Folding and unfolding the
  # mean of the pixels leaves a bias that is zero up to rounding.
  if getattr(model, 'pre_norm', False):
    if np.abs(arrays[_PATCH_BIAS]).max() < 1e-6:
      del arrays[_PATCH_BIAS]
  parse = functools.partial(_parse_noted, path, arrays)
  notes = foreign.noted(path, description, parse, stored)
  tensors.write(path, arrays, {_NOTES: json.dumps(notes)})
