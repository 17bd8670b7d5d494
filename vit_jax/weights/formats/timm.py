"""Weights under timm's names: `.safetensors`, and PyTorch's `.pth`.

The repositories of DeiT, MAE and DINO use these names too. What no array shows
is taken from the notes that `save` writes into a file, else from the
`config.json` next to it (as on the Hugging Face hub) and from the table of
timm's architectures, else from the defaults of the family that the file's name
or its arrays point to (`families.FAMILIES`).
"""

import json
import logging
import os
import re
from collections.abc import Container, Mapping
from typing import Any

from vit_jax.arrays import tree
from vit_jax.errors import UserError, closest
from vit_jax.files import paths
from vit_jax.models.swin import windows
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  families,
  foreign,
  settings,
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
_NOTES = 'vit_jax'  # key of our notes in the metadata of a file
_MODEL_ARGS: settings.Rules = {
  'num_heads': settings.integer(1, 4096),
  'window_size': settings.integer(1, 4096),
  'window_rule': settings.choice(windows.RULES),
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
  'mean': settings.MEAN,
  'std': settings.STD,
  'preprocess': {},
  'class_names': settings.NAMES,
}


def matches(path: str) -> bool:
  """Returns whether a path is a file of tensors or a folder of timm's.

  The folder is one as timm writes it for the Hugging Face hub.
  """
  if path.endswith(('.safetensors', *tensors.PICKLES)):
    return True
  folder = paths.locate(path)
  return (
    folder.is_dir()
    and (folder / 'config.json').exists()
    and 'architecture' in settings.read(folder / 'config.json')
  )


def load(path: str) -> Pretrained:
  """Describes the weights in a file, or in `model.safetensors` of a folder.

  Args:
    path: path, or ARCHITECTURE:PATH with one of timm's names for files next to
      which no config.json names it.

  Raises:
    UserError: the file is unreadable, holds pickled code, or holds neither a
      Vision Transformer nor a Swin; or timm has no such architecture.
  """
  path, given = _split(path)
  file = paths.locate(path)
  if file.is_dir():
    path = os.fspath(file / 'model.safetensors')
  arrays = tensors.read(path)
  family, notes = _family(arrays), _notes(path)
  if notes:  # which are complete
    size = {'input_size': (3, *notes.pop('image_size'))}
    args = family.UNNOTED | notes.pop('model_args', {})
    config = {'model_args': args, 'pretrained_cfg': size}
    found = family.describe(path, arrays, config)
    unseen = Unseen(known_from="the file's own notes", **notes)
    return foreign.pretrained(path, found, unseen)
  config = _config(path)
  named = config.get('architecture')
  architecture = given or (
    timm_models.find(named) if named else timm_models.of_file(path)
  )
  if architecture:
    _check_supported(path, architecture)
  found = family.describe(path, arrays, config, architecture)
  if named or architecture:
    unseen = _unseen(path, config, architecture, found.image_size)
  else:
    unseen = families.unseen(path, arrays, found.image_size)
  _warn_of_assumptions(
    path, family.assumptions(found, config, architecture, unseen.gelu)
  )
  return foreign.pretrained(path, found, unseen)


def _warn_of_assumptions(path: str, assumptions: list[str]) -> None:
  """Warns of values that the arrays do not show and nothing specifies."""
  if assumptions:
    log.warning(
      '%s does not specify its architecture; assumed: %s. Override this by '
      'load_pretrained(…, num_heads=…, gelu=…), or name the architecture: '
      'timm:ARCHITECTURE:PATH',
      path,
      '; '.join(assumptions),
    )


def _split(path: str) -> tuple[str, Architecture | None]:
  """Returns the path and the architecture that is written before it.

  Raises:
    UserError: timm has no architecture of that name.
  """
  written = re.match(r'([\w.]+):(?!//)(.+)', path)
  if written is None:
    return path, None
  found = timm_models.find(written[1])
  if found is None:
    names = {name.partition('.')[0] for name in timm_models.table()}
    near = closest(written[1], names).partition('allowed:')[0]
    raise UserError(
      f'{path} names the architecture {written[1]}, which '
      f'{timm_models.source()} does not have; {near}give a name of '
      'timm.list_models(), or a path only.'
    )
  return written[2], found


def _check_supported(path: str, architecture: Architecture) -> None:
  """Raises UserError for architectures that share only names with a ViT."""
  if architecture.block not in timm_models.SUPPORTED:
    raise UserError(
      f'{path} is of the architecture {architecture.name}, whose blocks '
      f'({architecture.block} in timm) no model here computes. Take weights of '
      'another architecture.'
    )


def _notes(path: str) -> dict[str, Any]:
  """Returns the notes that `save` wrote into a file; {} if there are none."""
  text = tensors.metadata(path).get(_NOTES)
  if text is None:
    return {}
  place = f'the metadata of {path}'
  notes = settings.validated(place, settings.parse(place, text), _NOTES_RULES)
  settings.require(place, notes, ('image_size',))
  unknown = sorted(set(notes) - set(_NOTES_RULES))
  if unknown:
    raise UserError(
      f'{place} has the keys {", ".join(unknown)}, which this version does not '
      'read: load it with the version of vit_jax that wrote it.'
    )
  return notes


def _config(path: str) -> dict[str, Any]:
  """Returns timm's config.json next to a file; {} if there is none."""
  file = paths.locate(path).parent / 'config.json'
  found = settings.read(file)
  if 'architecture' not in found:
    return {}  # of another program
  return settings.validated(file, found, _CONFIG)


def _family(names: Container[str]) -> Any:
  """Returns the module for models with these arrays or parameters."""
  return timm_swin if timm_swin.holds(names) else timm_vit


def _unseen(
  path: str,
  config: Mapping[str, Any],
  architecture: Architecture | None,
  image_size: tuple[int, int],
) -> Unseen:
  """Returns what config.json and the table contain; the former has priority."""
  given = config.get('pretrained_cfg', {})
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
    if not given:
      # A config.json with pixels but without resizing means timm's defaults.
      evaluation = architecture[-3:]
  elif 'quickgelu' in config['architecture']:
    activation = 'quick'
  named = config.get('model_args', {}).get('act_layer')
  if named is not None:
    activation = foreign.gelu(path, named)
  return Unseen(
    known_from=' and '.join(sources),
    gelu=activation,
    epsilon=epsilon,
    mean=given.get('mean', mean),
    std=given.get('std', std),
    preprocess=families.preprocess(
      image_size,
      given.get('crop_pct', evaluation[0]),
      given.get('interpolation', evaluation[1]),
      given.get('crop_mode', evaluation[2]),
    ),
    class_names=given.get('label_names') or config.get('label_names') or (),
  )


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a `.safetensors` file with timm's names.

  What its arrays do not show is written into the metadata of its header.

  Args:
    path: path of the file, local or gs://.
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`.

  Raises:
    UserError: timm has no names for them, or they cannot be written.
  """
  if not path.endswith('.safetensors'):
    raise UserError(
      f"{path}: timm's weights are written as .safetensors only; give a path "
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
  )
  tensors.write(path, arrays, {_NOTES: json.dumps(notes)})
