"""Default settings, by family, for weights whose files contain none."""

import logging
import math
import os
import re
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.augment.presets import PRESETS, Preset, cropped
from vit_jax.weights.formats.foreign import Unseen
from vit_jax.weights.formats.normalization import CLIP, IMAGENET

log = logging.getLogger('vit_jax')


class Family(NamedTuple):
  """Patterns that recognize weights of a family, and their preprocessing.

  Attributes:
    pattern: regular expression for the name of a file in lower case.
    array: regular expression for the names of arrays, used if no family's
      pattern matches the file's name.
    preset: evaluation preprocessing.
    position_resize: method by which the repository of the family interpolates
      positions, see `resizing.METHODS`; None for that of timm.
  """

  pattern: str
  array: str
  preset: Preset
  position_resize: str | None = None


def _timm(crop_fraction: float, normalization: Any) -> Preset:
  """Returns timm's preset with another crop, and another mean and std."""
  changes = dict(normalization=normalization, larger=cropped(crop_fraction))
  return PRESETS['timm']._replace(**changes)


# The first family that matches is used, so families with more specific patterns
# come first. Each family has the crop of its repository, such as 224 of 256
# pixels for `dino`; `swin`, `clip` and `vit` have that of timm.
FAMILIES = {
  'swin': Family(
    r'swin', r'relative_position_bias_table$', _timm(0.9, IMAGENET)
  ),
  'clip': Family(r'clip', r'norm_pre\.weight$', _timm(0.9, CLIP)),
  'dinov2': Family(r'dinov2', r'register_tokens$', PRESETS['dino'], 'dino'),
  'dino': Family(r'dino', r'head\.last_layer', PRESETS['dino'], 'dino'),
  'mae': Family(
    r'(^|_)mae_', r'decoder_pos_embed$', PRESETS['mae'], 'bicubic_no_antialias'
  ),
  'deit3': Family(
    r'deit_?3',
    r'(gamma_1|ls1\.gamma)$',
    _timm(1.0, IMAGENET),
    'bicubic_no_antialias',
  ),
  'deit': Family(
    r'deit', r'dist_token$', _timm(0.875, IMAGENET), 'bicubic_no_antialias'
  ),
  'vit': Family(r'(?!)', r'(?!)', PRESETS['timm']),  # matches nothing
}


def unseen(
  path: str, arrays: Mapping[str, np.ndarray], image_size: tuple[int, int]
) -> Unseen:
  """Returns the defaults of the family that a file seems to belong to.

  Args:
    path: path of the file.
    arrays: arrays under their names in the file.
    image_size: (height, width) of the model, pixels.
  """
  stem = os.path.basename(path).lower()
  by_name = [n for n, f in FAMILIES.items() if re.search(f.pattern, stem)]
  by_array = [
    name
    for name, family in FAMILIES.items()
    if any(re.search(family.array, array) for array in arrays)
  ]
  name = [*by_name, *by_array, 'vit'][0]
  preset = FAMILIES[name].preset
  mean, std = preset.normalization
  return Unseen(
    known_from=f'the defaults of the family {name}',
    gelu='quick' if 'quickgelu' in stem else 'exact',
    mean=mean,
    std=std,
    preprocess=preset.section(image_size),
    position_resize=_position_resize(name, arrays),
    # Arrays are weak evidence: LayerScale, for example, also occurs outside of
    # DeiT-III.
    assumed=not by_name,
  )


def _position_resize(name: str, names: Container[str]) -> str | None:
  """Returns the method of a family; DINOv2's differs with registers."""
  if name == 'dinov2' and 'register_tokens' in names:
    return 'bicubic'
  return FAMILIES[name].position_resize


def preprocess(
  image_size: tuple[int, int],
  crop_fraction: float,
  interpolation: str = 'bicubic',
  crop_mode: str = 'center',
) -> dict[str, Any]:
  """Returns the config section for the preprocessing of timm's evaluation.

  Args:
    image_size: (height, width), pixels.
    crop_fraction: timm's `crop_pct`, in (0, 1].
    interpolation: 'bicubic' or 'bilinear'; any other is replaced by 'bicubic',
      with a warning.
    crop_mode: 'center', which keeps the aspect ratio, or 'squash'.
  """
  size = max(image_size)
  # timm rounds the side of the resized image down to whole pixels.
  fraction = size / math.floor(size / crop_fraction)
  names = {'bilinear': 'bilinear_antialias'}
  if interpolation not in ('bicubic', *names):
    log.warning('images are resized by bicubic, not %s', interpolation)
  resize = 'torchvision'
  if crop_mode == 'squash':
    resize = 'squash' if fraction == 1 else 'squash_central'
  return {
    'resize': resize,
    'central_fraction': fraction,
    'interpolation': names.get(interpolation, 'bicubic'),
  }
