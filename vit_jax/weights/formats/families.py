"""What weights were evaluated with, where nothing but their family tells."""

import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.weights.formats.foreign import Unseen
from vit_jax.weights.formats.normalization import CLIP, IMAGENET, NONE

log = logging.getLogger('vit_jax')


class Family(NamedTuple):
  """What a family of weights was evaluated with.

  Attributes:
    pattern: in the name of a file or of timm's architecture.
    array: in the names of arrays, where no other name tells.
    normalization: mean and deviation of the pixels.
    crop_share: of the resized smaller side.
  """

  pattern: str
  array: str
  normalization: tuple[tuple[float, ...], tuple[float, ...]]
  crop_share: float


# The first that is found; the shares are those of the repositories' own
# evaluation (224 of 256 pixels), for `swin`, `clip` and `vit`
# timm's.
FAMILIES = {
  'swin': Family(r'swin', r'relative_position_bias_table$', IMAGENET, 0.9),
  'clip': Family(r'clip', r'norm_pre\.weight$', CLIP, 0.9),
  'dinov2': Family(r'dinov2', r'register_tokens$', IMAGENET, 0.875),
  'dino': Family(r'dino', r'head\.last_layer', IMAGENET, 0.875),
  'mae': Family(r'(^|_)mae_', r'decoder_pos_embed$', IMAGENET, 0.875),
  'deit3': Family(r'deit_?3', r'(gamma_1|ls1\.gamma)$', IMAGENET, 1.0),
  'deit': Family(r'deit', r'dist_token$', IMAGENET, 0.875),
  'vit': Family(r'', r'', NONE, 0.9),
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
  mean, std = FAMILIES[family].normalization
  return Unseen(
    known_from=f'the defaults of the family {family}',
    gelu='quick' if 'quickgelu' in stem else 'exact',
    mean=mean,
    std=std,
    preprocess=preprocess(image_size, FAMILIES[family].crop_share),
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
