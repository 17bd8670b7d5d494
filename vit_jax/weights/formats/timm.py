"""Weights under timm's names: `.safetensors`, and PyTorch's `.pth`.

The repositories of DeiT, MAE and DINO use these names too. What no array shows
is taken from the notes that `save` leaves in a file, else from the
`config.json` beside it (as on the Hugging Face hub), else from the defaults of
the family that the file's name or its arrays tell (`families.FAMILIES`).
"""

import json
import os
from collections.abc import Container, Mapping
from typing import Any

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import (
  families,
  foreign,
  tensors,
  timm_swin,
  timm_vit,
)
from vit_jax.weights.formats.foreign import Unseen
from vit_jax.weights.formats.normalization import NONE

PyTree = Any
_NOTES = 'vit_jax'  # the key of a file's notes


def matches(path: str) -> bool:
  """By the file's ending, or a folder as timm writes it for the hub."""
  if path.endswith(('.safetensors', *tensors.PICKLES)):
    return True
  folder = paths.locate(path)
  return (
    folder.is_dir()
    and (folder / 'config.json').exists()
    and 'architecture' in tensors.read_json(folder / 'config.json')
  )


def load(path: str) -> Pretrained:
  """Looks at a file, or at `model.safetensors` of a folder.

  Raises:
    UserError: unreadable, code in a pickle, or neither a Vision Transformer
      nor a Swin.
  """
  file = paths.locate(path)
  if file.is_dir():
    path = os.fspath(file / 'model.safetensors')
  arrays = tensors.read(path)
  config = tensors.read_json(paths.locate(path).parent / 'config.json')
  config = config if 'architecture' in config else {}
  notes = json.loads(tensors.metadata(path).get(_NOTES, '{}'))
  if notes:
    size = (3, *notes.pop('image_size'))
    config = dict(
      model_args=notes.pop('model_args'), pretrained_cfg=dict(input_size=size)
    )
  found = _family(arrays).describe(path, arrays, config)
  if notes:
    unseen = Unseen(known_from="the file's own notes", **notes)
  elif config:
    unseen = _unseen_by_config(path, config, found.image_size)
  else:
    unseen = families.unseen(path, arrays, found.image_size)
  return foreign.pretrained(path, found, unseen)


def _family(names: Container[str]) -> Any:
  """The module that knows the models with these arrays or parameters."""
  return timm_swin if timm_swin.holds(names) else timm_vit


def _unseen_by_config(
  path: str, config: Mapping[str, Any], image_size: tuple[int, int]
) -> Unseen:
  given = config.get('pretrained_cfg', {})
  activation = config.get('model_args', {}).get('act_layer', 'gelu')
  if 'quickgelu' in config['architecture']:
    activation = 'quick_gelu'
  return Unseen(
    known_from='config.json',
    gelu=foreign.gelu(path, activation),
    mean=given.get('mean', NONE[0]),
    std=given.get('std', NONE[1]),
    preprocess=families.preprocess(
      image_size,
      given.get('crop_pct', 0.9),
      given.get('interpolation', 'bicubic'),
      given.get('crop_mode', 'center'),
    ),
    class_names=given.get('label_names') or config.get('label_names') or (),
  )


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a `.safetensors` file with timm's names.

  What its arrays do not show stands in the notes of its head.

  Raises:
    UserError: timm has no names for them, or it cannot be written.
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
