"""Weights in Hugging Face directories: `config.json` and weight files.

They are those of the library `transformers`. `_TYPES` maps each type of model
to the module for it.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  foreign,
  settings,
  shards,
  tensors,
  timm_swin,
)
from vit_jax.weights.formats import huggingface_processor as processor
from vit_jax.weights.formats import huggingface_swin as swin
from vit_jax.weights.formats import huggingface_vit as vit
from vit_jax.weights.formats.foreign import Unseen

PyTree = Any
_TYPES: dict[str, Any] = {
  **dict.fromkeys(vit.CLASSES, vit),
  **dict.fromkeys(swin.CLASSES, swin),
}
_CONFIG: settings.Rules = {
  'model_type': settings.TEXT,
  'hidden_act': settings.TEXT,
  'layer_norm_eps': settings.number(0, 1),
  'id2label': settings.Rule(
    lambda value: (
      isinstance(value, dict)
      and all(key.isdecimal() and len(key) < 10 for key in value)
      and all(isinstance(name, str) for name in value.values())
    ),
    'an object of class names, whose keys are numbers of up to 9 digits',
  ),
}


def matches(path: str) -> bool:
  """Returns whether a path is a Hugging Face directory, or a file in one."""
  file = shards.directory(path) / 'config.json'
  return file.exists() and 'model_type' in settings.read(file)


def load(path: str) -> Pretrained:
  """Describes the weights in a directory with one or several weight files.

  Args:
    path: path of the directory, or of a weight file in it.

  Raises:
    UserError: the directory cannot be read, is damaged, or contains a type of
      model that is not supported.
  """
  folder = shards.directory(path)
  file = folder / 'config.json'
  config = settings.validated(file, settings.read(file), _CONFIG)
  kind = config.get('model_type')
  if kind not in _TYPES:
    raise UserError(
      f'{path} contains a model of the type {kind!r}; supported types: '
      f'{", ".join(_TYPES)}.'
    )
  config = settings.validated(file, config, _TYPES[kind].RULES)
  settings.require(file, config, _TYPES[kind].REQUIRED)
  arrays = shards.read(shards.find(path))
  described = _TYPES[kind].describe(path, arrays, config)
  return foreign.pretrained(path, described, _unseen(path, folder, config))


def _unseen(path: str, folder: Any, config: Mapping[str, Any]) -> Unseen:
  """Returns the settings in a directory that its arrays do not determine."""
  file = folder / 'preprocessor_config.json'
  stored = settings.validated(file, settings.read(file), processor.RULES)
  values = stored or processor.DEFAULTS[config['model_type']]
  names = config.get('id2label', {})
  mean, std = processor.statistics(values)
  return Unseen(
    known_from='config.json and '
    + ('preprocessor_config.json' if stored else "the library's defaults"),
    gelu=foreign.gelu(path, config.get('hidden_act', 'gelu')),
    epsilon=config.get('layer_norm_eps', 1e-12),
    mean=mean,
    std=std,
    preprocess=processor.read(values),
    class_names=[names[key] for key in sorted(names, key=int)],
  )


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
  model = Pretrained('', about, lambda abstract: None).model()
  family = swin if timm_swin.holds(tree.flatten(params)) else vit
  kind = family.kind(model)
  arrays = foreign.exported(params, about, family.naming(model))
  arrays = family.completed(model, arrays)
  if model.num_classes:
    arrays = {
      name if 'classifier' in name else f'{kind}.{name}': array
      for name, array in arrays.items()
    }
  files = {
    'config.json': _config(model, family, about),
    'preprocessor_config.json': processor.written(about),
  }
  try:
    with paths.new_folder(folder) as unfinished:
      for name, content in files.items():
        (unfinished / name).write_text(json.dumps(content, indent=2))
      tensors.write(os.fspath(unfinished / 'model.safetensors'), arrays, {})
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error


def _config(
  model: Any, family: Any, about: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the content of config.json."""
  kind, (height, width) = family.kind(model), about['image_size']
  ending = 'ForImageClassification' if model.num_classes else 'Model'
  if getattr(model, 'distilled', False):
    ending += 'WithTeacher'
  config = dict(
    model_type=kind,
    architectures=[family.CLASSES[kind] + ending],
    image_size=height if height == width else [height, width],
    num_channels=3,
    **family.written(model),
  )
  if not model.num_classes:
    return config
  names = dict(enumerate(about['class_names']))
  return config | {
    'id2label': {str(i): name for i, name in names.items()},
    'label2id': {name: i for i, name in names.items()},
  }
