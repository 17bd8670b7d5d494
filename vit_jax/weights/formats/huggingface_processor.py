"""Hugging Face's preprocessor_config.json, read and written."""

import logging
from collections.abc import Mapping
from typing import Any

from vit_jax.weights.formats import foreign
from vit_jax.weights.formats.normalization import IMAGENET, NONE

log = logging.getLogger('vit_jax')
# Where preprocessor_config.json is missing: what the library does by default.
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
DEFAULTS['dinov2_with_registers'] = DEFAULTS['dinov2']
DEFAULTS['swin'] = DEFAULTS['vit'] | dict(
  resample=3, image_mean=IMAGENET[0], image_std=IMAGENET[1]
)
# Pillow's numbers of filters.
_FILTERS = {2: 'bilinear_antialias', 3: 'bicubic'}
_NUMBERS = {'bilinear': 2, 'area': 2, 'bilinear_antialias': 2, 'bicubic': 3}


def pair(size: Any) -> tuple[int, int]:
  """(height, width) of a number, a list or a dict of the library."""
  if isinstance(size, Mapping):
    return size['height'], size['width']
  sides = [size] if isinstance(size, int) else list(size)
  return sides[0], sides[-1]


def read(given: Mapping[str, Any]) -> dict[str, Any]:
  """A config section that does what the library's processor does."""
  number = given.get('resample', 2)
  if number not in _FILTERS:
    log.warning("images are resized by bicubic, not Pillow's filter %s", number)
  section = {'interpolation': _FILTERS.get(number, 'bicubic')}
  size = given.get('size', 224)
  cropped = given.get('do_center_crop', False)
  shorter = size.get('shortest_edge') if isinstance(size, Mapping) else None
  if not cropped:
    return section | {'resize': 'squash'}
  larger = shorter or pair(size)[0]
  share = pair(given.get('crop_size', larger))[0] / larger
  resize = 'torchvision' if shorter else 'squash_central'
  return section | {'resize': resize, 'central_fraction': min(share, 1.0)}


def written(about: Mapping[str, Any]) -> dict[str, Any]:
  """The library's settings for what `about` says of preprocessing."""
  height, width = about['image_size']
  section = {'resize': 'squash', 'central_fraction': 0.875}
  section |= {'interpolation': 'bilinear', **about['preprocess']}
  mean, std = foreign.mean_and_std(dict(about))
  config = dict(
    image_processor_type='ViTImageProcessor',
    do_resize=True,
    size={'height': height, 'width': width},
    resample=_NUMBERS[section['interpolation']],
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=mean,
    image_std=std,
  )
  if section['resize'] == 'squash':
    return config
  share = section['central_fraction']
  larger = {'height': round(height / share), 'width': round(width / share)}
  if section['resize'] != 'squash_central':
    larger = {'shortest_edge': round(max(height, width) / share)}
  return config | dict(
    image_processor_type='DeiTImageProcessor'
    if section['resize'] == 'squash_central'
    else 'BitImageProcessor',
    size=larger,
    do_center_crop=True,
    crop_size={'height': height, 'width': width},
    do_convert_rgb=True,
  )
