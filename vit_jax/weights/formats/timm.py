"""Weights with timm's names: `.safetensors`, and PyTorch's `.pth`.

The repositories of DeiT, MAE and DINO also use these names, or older ones.
Settings that the arrays do not determine are those of the first source that
exists:

1. the notes that `save` writes into a file
2. the `config.json` next to the file (as on the Hugging Face hub) and the table
   of timm's architectures
3. the defaults of a family, which is recognized by the name of the file or by
   its arrays (timm_families.csv)
"""

import dataclasses
import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError, check_choice
from vit_jax.files import paths
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
from vit_jax.weights.formats.timm_parsing import (
  NAMES,
  PATCH_BIAS,
  WITHOUT_KEY_BIAS,
  Settings,
  parse,
)

log = logging.getLogger('vit_jax')
PyTree = Any
_NOTES = 'vit_jax'  # key of the notes in the metadata of a file
# Name that occurs in all models of transformers
_HUGGING_FACE = r'(^|\.)embeddings\.patch_embeddings?\.'


def load(
  path: str, config: dict[str, Any] | None = None
) -> Pretrained | SeveralModels:
  """Describes the weights in a file, or in a folder with a config.json.

  Args:
    path: path of the file or folder, or ARCHITECTURE:PATH with timm's name of
      the architecture, for files without a config.json that contains the name.
    config: result of `tensors.read_config`, if it is known.

  Raises:
    UserError: the file cannot be read, contains pickled code, or contains
      neither a Vision Transformer nor a Swin; or timm has no such architecture.
  """
  path, architecture = _split(path)
  if config is None:
    config = tensors.read_config(path) or {}
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
  # The names in the file show its family, see `family_settings`.
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
  known = Settings(
    args,
    (size[1], size[2]) if size else None,
    args.get('global_pool') or config.get('global_pool'),
    architecture,
  )
  parsed = parse(path, arrays, known)
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
  if match is None or paths.locate(path).exists():  # a name with a colon
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
  settings = Settings(args, values['image_size'], is_noted=True)
  parsed = parse(path, arrays, settings)
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
  path: str, parsed: ParsedWeights, settings: Settings
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
    names, stored = swin.NAMES, ('window_size', 'window_rule')
  elif getattr(model, 'qkv_bias', 'all') == 'query_value':
    names = WITHOUT_KEY_BIAS
  arrays = foreign.exported(params, description, names)
  if getattr(model.config, 'rotary', None):
    raise names_lib.not_writable(
      'rotations, because timm orders the channels of heads in another way'
    )
  # The patch embedding of CLIP has no bias in timm. Folding and unfolding the
  # mean of the pixels leaves a bias that is zero up to rounding.
  if getattr(model, 'pre_norm', False):
    if np.abs(arrays[PATCH_BIAS]).max() < 1e-6:
      del arrays[PATCH_BIAS]
  read_back = functools.partial(_parse_noted, path, arrays)
  notes = foreign.noted(path, description, read_back, stored)
  tensors.write(path, arrays, {_NOTES: json.dumps(notes)})
