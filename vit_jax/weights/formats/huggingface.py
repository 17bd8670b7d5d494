"""Weights in Hugging Face directories: `config.json` and weight files.

They are those of the library `transformers`; see `TYPES`, which also contains
the values of keys that a `config.json` does not have. The preprocessing is that
of `preprocessor_config.json`.
"""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.arrays.pixels import NONE
from vit_jax.errors import check_choice
from vit_jax.files import paths
from vit_jax.models.contract import Statistics
from vit_jax.weights import foreign, metadata
from vit_jax.weights.contract import Pretrained, SeveralModels
from vit_jax.weights.description import Description
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import containers, tensors, vit
from vit_jax.weights.formats import huggingface_models as models
from vit_jax.weights.formats.huggingface_texts import with_text

log = logging.getLogger('vit_jax')
PyTree = Any
Arrays = dict[str, np.ndarray]


class _Type(NamedTuple):
  """A type of models in transformers.

  Attributes:
    processor: preprocessing without a preprocessor_config.json, as its keys.
    defaults: values of the keys that are read from config.json and may be
      missing there, as in the config's class of the library.
    text: the same for `text_config`, of models of images and texts.
  """

  processor: Mapping[str, Any]
  defaults: Mapping[str, Any]
  text: Mapping[str, Any] = {}


_TABLE = pathlib.Path(__file__).with_name('huggingface_types.json')
_CONTENT = json.loads(_TABLE.read_text())
VERSION = _CONTENT['version']  # of the library, whose defaults `TYPES` contains
TYPES = {kind: _Type(**values) for kind, values in _CONTENT['types'].items()}


def load(
  path: str, config: dict[str, Any] | None = None
) -> Pretrained | SeveralModels:
  """Describes the weights in a directory with one or several weight files.

  Args:
    path: path of the directory, or of a weight file in it.
    config: result of `tensors.read_config`, if it is known.

  Raises:
    UserError: the directory cannot be read, is damaged, or contains a type of
      model that is not supported.
  """
  folder = tensors.folder_of(path)
  file = folder / 'config.json'
  if config is None:
    config = tensors.read_config(path) or {}
  kind, tower = str(config.get('model_type')), config.get('vision_config')
  if isinstance(tower, dict):  # a model of images and texts
    kind, config = f'{kind}_vision_model', config | tower
  check_choice(f'the type of the model in {path}', kind, TYPES)
  settings = metadata.SWIN_SETTINGS if kind == 'swin' else metadata.SETTINGS
  config = metadata.validated(file, config, settings=settings)
  arrays, _ = tensors.read(path)
  file = folder / 'preprocessor_config.json'
  processor = metadata.validated(file, metadata.read(file))

  def describe(arrays: Arrays) -> Pretrained:
    parsed = _parsed(path, arrays, kind, config, processor)
    return foreign.imported(path, parsed)

  return containers.described(path, arrays, describe)


def _parsed(
  path: str,
  arrays: Arrays,
  kind: str,
  given: dict[str, Any],
  stored: Mapping[str, Any],
) -> ParsedWeights:
  """Parses a model, given the contents of the files in its directory."""
  config = {**TYPES[kind].defaults, **given}
  parse = models.parse_swin if kind == 'swin' else models.parse_vit
  parsed = parse(path, arrays, config | {'model_type': kind})
  values = stored or TYPES[kind].processor
  mean, std = _statistics(values)
  names = config.get('id2label', {})
  known_from = ['config.json']
  if missing := [key for key in config if key not in given]:
    known_from.append(f'{VERSION} (defaults of {", ".join(missing)})')
  known_from.append(
    'preprocessor_config.json' if stored else 'the usual preprocessing'
  )
  properties = parsed.metadata.updated(
    known_from=', '.join(known_from),
    gelu=metadata.GELUS[config['hidden_act']],
    norm_eps=config['layer_norm_eps'],
    mean=mean,
    std=std,
    preprocess=_preprocess(values),
    class_names=[names[key] for key in sorted(names, key=int)],
  )
  parsed = vit.with_decoder(
    path,
    parsed._replace(metadata=properties),
    config.get('decoder_num_attention_heads'),
    config.get('norm_pix_loss', False),
  )
  if 'text_config' not in config:
    return parsed
  text_config = {**TYPES[kind].text, **config['text_config']}
  return with_text(path, arrays, text_config, parsed)


def save(path: str, params: PyTree, description: Description) -> None:
  """Writes a directory that transformers can load offline.

  Args:
    path: path of the directory, which must not exist.
    params: parameters of the objective that is described.
    description: what the weights are.

  Raises:
    UserError: the directory exists, or transformers has no equivalent model.
  """
  folder = paths.locate_new(path)
  model = description.built_model
  written = models.written(model)
  # A model with only those options that the type has must be the same model.
  keys = {key: getattr(model, key) for key in written.supported}
  section = {'name': description.model['name'], **keys}
  of_type = foreign.determined(dataclasses.replace(description, model=section))
  foreign.check_same(foreign.determined(description), of_type)
  arrays = foreign.exported(params, description, written.names)
  exported = models.completed(model, written.kind, arrays)
  height, width = description.image_size
  ending = 'ForImageClassification' if model.num_classes else 'Model'
  if model.distilled:
    ending += 'WithTeacher'
  config: dict[str, Any] = dict(
    model_type=written.kind,
    architectures=[written.class_name + ending],
    image_size=height if height == width else [height, width],
    num_channels=3,
    **written.config,
  )
  processor = _processor(description)
  parsed = _parsed(path, exported, written.kind, config, processor)
  foreign.check_opens(path, description, parsed, written.equivalent)
  exported |= models.unused(model, written.kind)
  if model.num_classes:
    exported = {
      name if 'classifier' in name else f'{written.kind}.{name}': array
      for name, array in exported.items()
    }
    labels = dict(enumerate(description.class_names))
    config['id2label'] = {str(i): name for i, name in labels.items()}
    config['label2id'] = {name: i for i, name in labels.items()}
  files = {'config.json': config, 'preprocessor_config.json': processor}
  with paths.new_folder(folder) as unfinished:
    for name, content in files.items():
      (unfinished / name).write_text(json.dumps(content, indent=2))
    tensors.write(os.fspath(unfinished / 'model.safetensors'), exported, {})


# Preprocessing

# Key of a section that only this package reads. It is written for interpolation
# filters that transformers does not have.
_OWN = 'vit_jax_preprocess'
# {Pillow's number of a filter: name here}. Pillow's filters antialias when an
# image shrinks.
_FILTERS = {2: 'bilinear_antialias', 3: 'bicubic'}
_NUMBERS = {name: number for number, name in _FILTERS.items()}


def _statistics(given: Mapping[str, Any]) -> Statistics:
  """Returns the mean and std of pixels in [0, 1] that a processor subtracts.

  Pixels from 0 to 255 are multiplied by `rescale_factor` and then normalized;
  each step can be switched off. If their values are not in [0, 1] after the
  first step, mean and std are converted.

  Args:
    given: content of preprocessor_config.json.
  """
  mean = given.get('image_mean', NONE[0])
  std = given.get('image_std', NONE[1])
  if not given.get('do_normalize', True):
    mean, std = (0.0,) * 3, (1.0,) * 3
  factor = given.get('rescale_factor', 1 / 255)
  largest = 255 * factor if given.get('do_rescale', True) else 255.0
  if abs(largest - 1) < 1e-6:  # 0.00392156862745098 in most files
    return tuple(mean), tuple(std)
  return tuple(x / largest for x in mean), tuple(x / largest for x in std)


def _preprocess(given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the config section that is equivalent to transformers' processor.

  Args:
    given: content of preprocessor_config.json.
  """
  if _OWN in given:
    return dict(given[_OWN])
  number = given.get('resample', 2)
  if number not in _FILTERS:
    log.warning("images are resized by bicubic, not Pillow's filter %s", number)
  section = {'interpolation': _FILTERS.get(number, 'bicubic')}
  size = given.get('size', 224)
  cropped = given.get('do_center_crop', False)
  shorter = size.get('shortest_edge') if isinstance(size, Mapping) else None
  if not cropped:
    return section | {'resize': 'squash'}
  larger = shorter or metadata.pair(size)[0]  # side before the crop
  # transformers pads a crop that is larger than the image; here, the crop is
  # limited to the image.
  fraction = min(metadata.pair(given.get('crop_size', larger))[0] / larger, 1.0)
  resize = 'torchvision' if shorter else 'squash_central'
  return section | {'resize': resize, 'central_fraction': fraction}


def _processor(description: Description) -> dict[str, Any]:
  """Returns the preprocessor_config.json for the preprocessing of weights.

  Args:
    description: what the weights are.
  """
  height, width = description.image_size
  mean, std = description.statistics or NONE
  # Defaults of the transform for evaluation, `augment.transforms`
  section = {'resize': 'squash', 'central_fraction': 0.875}
  section |= {'interpolation': 'bilinear', **description.preprocess}
  config = dict(
    image_processor_type='ViTImageProcessor',
    do_resize=True,
    size={'height': height, 'width': width},
    resample=_NUMBERS.get(section['interpolation'], 2),
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=list(mean),
    image_std=list(std),
  )
  if section['interpolation'] not in _NUMBERS:
    log.warning(
      'Hugging Face has no interpolation %r: its library will resize images by '
      'bilinear with antialiasing, and vit_jax by %r as before',
      section['interpolation'],
      section['interpolation'],
    )
    config[_OWN] = dict(description.preprocess)
  if section['resize'] == 'squash':
    return config
  fraction = section['central_fraction']
  is_squashed = section['resize'] == 'squash_central'
  larger = {
    'height': round(height / fraction),
    'width': round(width / fraction),
  }
  shorter = {'shortest_edge': round(max(height, width) / fraction)}
  return config | dict(
    image_processor_type=f'{"DeiT" if is_squashed else "Bit"}ImageProcessor',
    size=larger if is_squashed else shorter,
    do_center_crop=True,
    crop_size={'height': height, 'width': width},
    do_convert_rgb=True,
  )
