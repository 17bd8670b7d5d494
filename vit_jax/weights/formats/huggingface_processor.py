"""Reads and writes preprocessor_config.json of Hugging Face."""

import logging
from collections.abc import Mapping
from typing import Any

from vit_jax.data.augment.presets import IMAGENET, NONE
from vit_jax.models.contract import Statistics
from vit_jax.weights import metadata
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.patch_embedding import CLIP

log = logging.getLogger('vit_jax')


# Key of a section that only this package reads. It is written for interpolation
# filters that transformers does not have.
_OWN = 'vit_jax_preprocess'
# Defaults of transformers for directories without preprocessor_config.json, by
# type of model.
DEFAULTS: dict[str, dict[str, Any]] = {
  'vit': dict(
    size={'height': 224, 'width': 224},
    resample=2,
    image_mean=NONE[0],
    image_std=NONE[1],
  ),
  'deit': dict(
    size={'height': 256, 'width': 256},
    crop_size={'height': 224, 'width': 224},
    do_center_crop=True,
    resample=3,
    image_mean=IMAGENET[0],
    image_std=IMAGENET[1],
  ),
}
DEFAULTS['dinov2'] = DEFAULTS['deit'] | {'size': {'shortest_edge': 256}}
DEFAULTS['dinov3_vit'] = DEFAULTS['vit'] | dict(
  image_mean=IMAGENET[0], image_std=IMAGENET[1]
)
DEFAULTS['dinov2_with_registers'] = DEFAULTS['dinov2']
DEFAULTS['swin'] = DEFAULTS['vit'] | dict(
  resample=3, image_mean=IMAGENET[0], image_std=IMAGENET[1]
)
DEFAULTS['vit_mae'] = DEFAULTS['vit_msn'] = DEFAULTS['vit']
DEFAULTS['ijepa'] = DEFAULTS['siglip2_vision_model'] = DEFAULTS['vit']
DEFAULTS['siglip_vision_model'] = DEFAULTS['vit'] | {'resample': 3}
DEFAULTS['clip_vision_model'] = DEFAULTS['dinov2'] | dict(
  size={'shortest_edge': 224}, image_mean=CLIP[0], image_std=CLIP[1]
)
# {Pillow's number of a filter: name here}. Pillow's filters antialias when an
# image shrinks.
_FILTERS = {2: 'bilinear_antialias', 3: 'bicubic'}
_NUMBERS = {name: number for number, name in _FILTERS.items()}


def statistics(given: Mapping[str, Any]) -> Statistics:
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


def read(given: Mapping[str, Any]) -> dict[str, Any]:
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
  larger = shorter or metadata.pair(size)[0]
  # transformers pads a crop that is larger than the image; here, the crop is
  # limited to the image.
  fraction = min(metadata.pair(given.get('crop_size', larger))[0] / larger, 1.0)
  resize = 'torchvision' if shorter else 'squash_central'
  return section | {'resize': resize, 'central_fraction': fraction}


def written(properties: ModelMetadata) -> dict[str, Any]:
  """Returns the preprocessor_config.json for the preprocessing of weights.

  Args:
    properties: properties of the weights.
  """
  height, width = properties.image_size
  section = {'resize': 'squash', 'central_fraction': 0.875}
  section |= {'interpolation': 'bilinear', **properties.preprocess}
  config = dict(
    image_processor_type='ViTImageProcessor',
    do_resize=True,
    size={'height': height, 'width': width},
    resample=_NUMBERS.get(section['interpolation'], 2),
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=list(properties.mean),
    image_std=list(properties.std),
  )
  if section['interpolation'] not in _NUMBERS:
    log.warning(
      'Hugging Face has no interpolation %r: its library will resize images by '
      'bilinear with antialiasing, and vit_jax by %r as before',
      section['interpolation'],
      section['interpolation'],
    )
    config[_OWN] = dict(properties.preprocess)
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
