"""Weights with timm's names: `.safetensors`, and PyTorch's `.pth`.

The repositories of DeiT, MAE and DINO also use these names. Settings that the
arrays do not determine are those of the first source that exists:

1. the notes that `save` writes into a file
2. the `config.json` next to the file (as on the Hugging Face hub) and the table
   of timm's architectures
3. the defaults of a family, which is recognized by the name of the file or by
   its arrays (`families.FAMILIES`)
"""

import json
import logging
import re
from collections.abc import Container, Mapping
from typing import Any

from vit_jax.arrays import tree
from vit_jax.errors import UserError, closest
from vit_jax.files import paths
from vit_jax.models import swin
from vit_jax.models.positions import METHODS
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  families,
  foreign,
  settings,
  shards,
  tensors,
  timm_models,
  timm_swin,
  timm_vit,
)
from vit_jax.weights.formats.foreign import Unseen
from vit_jax.weights.formats.normalization import NONE
from vit_jax.weights.formats.timm_models import Architecture

log = logging.getLogger('vit_jax')
PyTree = Any
_NOTES = 'vit_jax'  # key of the notes in the metadata of a file
_MODEL_ARGS: settings.Rules = {
  'num_heads': settings.integer(1, 4096),
  'window_size': settings.integer(1, 4096),
  'window_rule': settings.choice(swin.RULES),
  'act_layer': settings.TEXT,
  'global_pool': settings.TEXT,
}
_CONFIG: settings.Rules = {
  'architecture': settings.TEXT,
  'global_pool': settings.TEXT,
  'label_names': settings.NAMES,
  'model_args': _MODEL_ARGS,
  'pretrained_cfg': {
    'input_size': settings.several(settings.SIDE, 3, 3),
    'mean': settings.MEAN,
    'std': settings.STD,
    'crop_pct': settings.number(0.1, 1),
    'interpolation': settings.TEXT,
    'crop_mode': settings.TEXT,
    'label_names': settings.NAMES,
  },
}
_NOTES_RULES: settings.Rules = {
  'model_args': _MODEL_ARGS,
  'image_size': settings.several(settings.SIDE, 2, 2),
  'gelu': settings.choice(foreign.KINDS_OF_GELU),
  'epsilon': settings.number(0, 1),
  'position_resize': settings.choice(METHODS),
  'mean': settings.MEAN,
  'std': settings.STD,
  'preprocess': {},
  'class_names': settings.NAMES,
}


def matches(path: str) -> bool:
  """Returns whether a path is a file of tensors or a folder saved by timm.

  timm writes such folders for the Hugging Face hub.
  """
  folder = paths.locate(path)
  if not folder.is_dir():
    return path.endswith(('.safetensors', *tensors.PICKLES))
  return (folder / 'config.json').exists() and 'architecture' in settings.read(
    folder / 'config.json'
  )


def load(path: str) -> Pretrained:
  """Describes the weights in a file, or in a folder with a config.json.

  Args:
    path: path of the file or folder, or ARCHITECTURE:PATH with timm's name of
      the architecture, for files without a config.json that contains the name.

  Raises:
    UserError: the file cannot be read, contains pickled code, or contains
      neither a Vision Transformer nor a Swin; or timm has no such architecture.
  """
  path, architecture = _split(path)
  path = shards.find(path)
  arrays = shards.read(path)
  family, notes = _family(arrays), _notes(path)
  if notes:  # notes contain all settings, so other sources are not needed
    size = {'input_size': (3, *notes.pop('image_size'))}
    args = family.UNNOTED | notes.pop('model_args', {})
    config = {'model_args': args, 'pretrained_cfg': size}
    described = family.describe(path, arrays, config)
    # Weights of this package, unless the notes contain another method.
    described = described._replace(position_resize=None)
    unseen = Unseen(known_from='the notes in the file', **notes)
    return foreign.pretrained(path, described, unseen)
  config = _config(path)
  name = config.get('architecture')
  architecture = architecture or (
    timm_models.find(name) if name else timm_models.of_file(path)
  )
  if architecture:
    _check_supported(path, architecture)
  described = family.describe(path, arrays, config, architecture)
  if name or architecture:
    unseen = _unseen(path, config, architecture, described.image_size)
  else:
    unseen = families.unseen(path, arrays, described.image_size)
  _warn_of_assumptions(
    path, family.assumptions(described, config, architecture, unseen.gelu)
  )
  return foreign.pretrained(path, described, unseen)


def _warn_of_assumptions(path: str, assumptions: list[str]) -> None:
  """Warns about values that neither arrays nor settings specify."""
  if assumptions:
    log.warning(
      '%s does not specify its architecture; assumed: %s. Override this by '
      'load_pretrained(…, num_heads=…, gelu=…), or name the architecture: '
      'timm:ARCHITECTURE:PATH',
      path,
      '; '.join(assumptions),
    )


def _split(path: str) -> tuple[str, Architecture | None]:
  """Splits [ARCHITECTURE:]PATH into the path and the architecture, or None.

  Raises:
    UserError: timm has no architecture of that name.
  """
  match = re.match(r'([\w.]+):(?!//)(.+)', path)
  if match is None:
    return path, None
  architecture = timm_models.find(match[1])
  if architecture is None:
    names = {name.partition('.')[0] for name in timm_models.table()}
    near = closest(match[1], names).partition('allowed:')[0]
    raise UserError(
      f'{path} contains the architecture {match[1]}, which '
      f'{timm_models.source()} does not have; {near}give a name of '
      'timm.list_models(), or a path only.'
    )
  return match[2], architecture


def _check_supported(path: str, architecture: Architecture) -> None:
  """Checks that the blocks of an architecture are supported.

  Other blocks may have parameters of the same names.

  Raises:
    UserError: the blocks of the architecture are not supported.
  """
  if architecture.block not in timm_models.SUPPORTED:
    raise UserError(
      f'{path} has the architecture {architecture.name}, whose blocks '
      f'({architecture.block} in timm) are not supported. Use weights of '
      'another architecture.'
    )


def _notes(path: str) -> dict[str, Any]:
  """Returns the notes that `save` wrote into a file; {} if there are none."""
  text = tensors.metadata(path).get(_NOTES)
  if text is None:
    return {}
  where = f'the metadata of {path}'
  notes = settings.validated(where, settings.parse(where, text), _NOTES_RULES)
  settings.require(where, notes, ('image_size',))
  unknown = sorted(set(notes) - set(_NOTES_RULES))
  if unknown:
    raise UserError(
      f'{where} has the keys {", ".join(unknown)}, which this version does not '
      'read: load it with the version of vit_jax that wrote it.'
    )
  return notes


def _config(path: str) -> dict[str, Any]:
  """Returns timm's config.json next to a file; {} if there is none."""
  file = paths.locate(path).parent / 'config.json'
  config = settings.read(file)
  if 'architecture' not in config:
    return {}  # a file of another program
  return settings.validated(file, config, _CONFIG)


def _family(names: Container[str]) -> Any:
  """Returns the module for models whose arrays or parameters have the names."""
  return timm_swin if timm_swin.holds(names) else timm_vit


def _unseen(
  path: str,
  config: Mapping[str, Any],
  architecture: Architecture | None,
  image_size: tuple[int, int],
) -> Unseen:
  """Returns the settings in config.json, and those in the table for others."""
  stored = config.get('pretrained_cfg', {})
  sources = []
  if config.get('architecture'):
    sources.append('config.json')
  mean, std = NONE
  evaluation = (0.9, 'bicubic', 'center')
  activation, epsilon = 'exact', None
  if architecture is not None:
    sources.append(f'{architecture.name} in {timm_models.source()}')
    mean, std = architecture.statistics
    activation, epsilon = architecture.gelu, architecture.norm_eps
    # For keys that a pretrained_cfg does not contain, timm uses its general
    # defaults, not those of the architecture.
    if not stored:
      evaluation = architecture[-3:]
  elif 'quickgelu' in config['architecture']:
    activation = 'quick'
  name = config.get('model_args', {}).get('act_layer')
  if name is not None:
    activation = foreign.gelu(path, name)
  return Unseen(
    known_from=' and '.join(sources),
    gelu=activation,
    epsilon=epsilon,
    mean=stored.get('mean', mean),
    std=stored.get('std', std),
    preprocess=families.preprocess(
      image_size,
      stored.get('crop_pct', evaluation[0]),
      stored.get('interpolation', evaluation[1]),
      stored.get('crop_mode', evaluation[2]),
    ),
    class_names=stored.get('label_names') or config.get('label_names') or (),
  )


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a `.safetensors` file with timm's names.

  Settings that the arrays do not determine are written into the metadata in the
  file's header.

  Args:
    path: path of the file, local or gs://.
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`.

  Raises:
    UserError: timm has no name for a parameter, or the file cannot be written.
  """
  if not path.endswith('.safetensors'):
    raise UserError(
      f"{path}: weights with timm's names are .safetensors files; give a path "
      'with that ending.'
    )
  model = Pretrained('', about, lambda abstract: None).model()
  family = _family(tree.flatten(params))
  naming = family.naming(model)
  arrays = family.completed(model, foreign.exported(params, about, naming))
  mean, std = foreign.mean_and_std(about)
  notes = dict(
    model_args=family.unshown(model),
    image_size=list(about['image_size']),
    gelu=model.gelu,
    epsilon=model.norm_eps,
    mean=mean,
    std=std,
    preprocess=about['preprocess'],
    class_names=about['class_names'],
    position_resize=about.get('position_resize'),
  )
  tensors.write(path, arrays, {_NOTES: json.dumps(notes)})
