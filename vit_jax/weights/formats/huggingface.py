"""Hugging Face directories: `config.json` and `.safetensors`.

What is inside is told by the module of its type of model (`_TYPES`).
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import foreign, tensors, timm_swin
from vit_jax.weights.formats import huggingface_processor as processor
from vit_jax.weights.formats import huggingface_swin as swin
from vit_jax.weights.formats import huggingface_vit as vit
from vit_jax.weights.formats.foreign import Unseen
from vit_jax.weights.formats.normalization import NONE

PyTree = Any
_TYPES: dict[str, Any] = {
  **dict.fromkeys(vit.CLASSES, vit),
  **dict.fromkeys(swin.CLASSES, swin),
}


def matches(path: str) -> bool:
  """A directory whose config.json names a type of model, or its weights."""
  folder = paths.locate(path)
  if path.endswith('.safetensors'):
    folder = folder.parent
  file = folder / 'config.json'
  return file.exists() and 'model_type' in tensors.read_json(file)


def load(path: str) -> Pretrained:
  """Looks at a directory, with one file of weights or several.

  Raises:
    UserError: unreadable, another type of model, or damaged.
  """
  folder = paths.locate(path)
  if path.endswith('.safetensors'):
    folder = folder.parent
  config = tensors.read_json(folder / 'config.json')
  kind = config.get('model_type')
  if kind not in _TYPES:
    raise UserError(
      f'{path} holds a model of the type {kind!r}; read are '
      f'{", ".join(_TYPES)}.'
    )
  found = _TYPES[kind].describe(path, _read(folder), config)
  return foreign.pretrained(path, found, _unseen(path, folder, config))


def _read(folder: Any) -> dict[str, np.ndarray]:
  """All arrays, of one file or of those that an index names."""
  index = folder / 'model.safetensors.index.json'
  if not index.exists():
    return tensors.read(os.fspath(folder / 'model.safetensors'))
  placed = tensors.read_json(index).get('weight_map', {})
  arrays = {}
  for name in sorted(set(placed.values())):
    arrays |= tensors.read(os.fspath(folder / name))
  lost = sorted(set(placed) - set(arrays))
  if lost:
    raise UserError(
      f'{index} names arrays that its files do not hold: {", ".join(lost)}.'
    )
  return arrays


def _unseen(path: str, folder: Any, config: Mapping[str, Any]) -> Unseen:
  found = tensors.read_json(folder / 'preprocessor_config.json')
  given = found or processor.DEFAULTS[config['model_type']]
  names = config.get('id2label', {})
  mean, std = given.get('image_mean', NONE[0]), given.get('image_std', NONE[1])
  if not given.get('do_normalize', True):
    mean, std = (0.0,) * 3, (1.0,) * 3
  return Unseen(
    known_from='config.json and '
    + ('preprocessor_config.json' if found else "the library's defaults"),
    gelu=foreign.gelu(path, config.get('hidden_act', 'gelu')),
    epsilon=config.get('layer_norm_eps', 1e-12),
    mean=mean,
    std=std,
    preprocess=processor.read(given),
    class_names=[names[key] for key in sorted(names, key=int)],
  )


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a directory that the library opens offline.

  Raises:
    UserError: it exists, or none of the library's models can be that model.
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
  folder.mkdir(parents=True)
  for name, content in (
    ('config.json', _config(model, family, about)),
    ('preprocessor_config.json', processor.written(about)),
  ):
    (folder / name).write_text(json.dumps(content, indent=2))
  tensors.write(os.fspath(folder / 'model.safetensors'), arrays, {})


def _config(
  model: Any, family: Any, about: Mapping[str, Any]
) -> dict[str, Any]:
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
