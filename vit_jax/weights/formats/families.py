"""What weights were evaluated with, where nothing but their family tells."""

import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.augment.presets import PRESETS, Preset, share
from vit_jax.weights.formats.foreign import Unseen
from vit_jax.weights.formats.normalization import CLIP, IMAGENET

log = logging.getLogger('vit_jax')


class Family(NamedTuple):
  """What a family of weights was evaluated with.

  Attributes:
    pattern: in the name of a file or of timm's architecture.
    array: in the names of arrays, where no other name tells.
    preset: of the evaluation.
  """

  pattern: str
  array: str
  preset: Preset


def _timm(crop_share: float, normalization: Any) -> Preset:
  """timm's evaluation, with other numbers."""
  changes = dict(normalization=normalization, larger=share(crop_share))
  return PRESETS['timm']._replace(**changes)


# The first that is found; the shares are those of the repositories' own
# evaluation (224 of 256 pixels), for `swin`, `clip` and `vit`
# timm's.
FAMILIES = {
  'swin': Family(
    r'swin', r'relative_position_bias_table$', _timm(0.9, IMAGENET)
  ),
  'clip': Family(r'clip', r'norm_pre\.weight$', _timm(0.9, CLIP)),
  'dinov2': Family(r'dinov2', r'register_tokens$', PRESETS['dino']),
  'dino': Family(r'dino', r'head\.last_layer', PRESETS['dino']),
  'mae': Family(r'(^|_)mae_', r'decoder_pos_embed$', PRESETS['mae']),
  'deit3': Family(r'deit_?3', r'(gamma_1|ls1\.gamma)$', _timm(1.0, IMAGENET)),
  'deit': Family(r'deit', r'dist_token$', _timm(0.875, IMAGENET)),
  'vit': Family(r'', r'', PRESETS['timm']),
}


def unseen(
  path: str, arrays: Mapping[str, np.ndarray], image_size: tuple[int, int]
) -> Unseen:
  """The defaults of the family that a file's name or its arrays tell.

  Args:
    path: of the file.
    arrays: under the names that they have in it.
    image_size: (height, width) of the model, pixels.
  """
  stem = os.path.basename(path).lower()
  named = (
    k for k, v in FAMILIES.items() if v.pattern and re.search(v.pattern, stem)
  )
  told = (
    k
    for k, v in FAMILIES.items()
    if any(re.search(v.array, name) for name in arrays)
  )
  family = next(named, None) or next(told, 'vit')
  preset = FAMILIES[family].preset
  mean, std = preset.normalization
  return Unseen(
    known_from=f'the defaults of the family {family}',
    gelu='quick' if 'quickgelu' in stem else 'exact',
    mean=mean,
    std=std,
    preprocess=preset.section(image_size),
  )


def preprocess(
  image_size: tuple[int, int],
  crop_share: float,
  interpolation: str = 'bicubic',
  crop_mode: str = 'center',
) -> dict[str, Any]:
  """A config section that does what timm does in evaluation.

  Args:
    image_size: (height, width), pixels.
    crop_share: timm's `crop_pct`.
    interpolation: 'bicubic' or 'bilinear'; for any other 'bicubic' is taken.
    crop_mode: 'center' keeps the aspect, 'squash' does not.
  """
  size = max(image_size)
  share = size / math.floor(size / crop_share)
  known = {'bilinear': 'bilinear_antialias'}
  if interpolation not in ('bicubic', *known):
    log.warning('images are resized by bicubic, not %s', interpolation)
  resize = 'torchvision'
  if crop_mode == 'squash':
    resize = 'squash' if share == 1 else 'squash_central'
  return {
    'resize': resize,
    'central_fraction': share,
    'interpolation': known.get(interpolation, 'bicubic'),
  }
