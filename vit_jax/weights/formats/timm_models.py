"""Settings of weights with timm's names, by architecture and by family.

The values of architectures are in `timm_table.csv`, which
benchmarks/write_timm_table.py writes from an installation of timm. A row
with a dot in its name is a set of weights whose evaluation differs from that of
the first set of its architecture.
"""

import collections
import csv
import functools
import logging
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.arrays.pixels import IMAGENET, NONE
from vit_jax.data.augment.presets import PRESETS, cropped
from vit_jax.models.contract import Statistics
from vit_jax.models.vit import SIZES
from vit_jax.weights.patch_embedding import CLIP

log = logging.getLogger('vit_jax')
TABLE = pathlib.Path(__file__).with_name('timm_table.csv')
FAMILIES = TABLE.with_name('timm_families.csv')
# Blocks that the models of this package do not have, and why not.
REFUSED = {
  'ParallelScalingBlock': 'attention and MLP of a layer have the same input',
  'ParallelThingsBlock': 'a layer has two attentions and two MLPs',
  'DiffBlock': 'attention is the difference of two softmaxes',
  'DiffParallelScalingBlock': 'attention is the difference of two softmaxes',
  'SwinOfOtherSizes': 'windows or heads of the stages are not regular',
}
# Starts of the names of timm's models that are not plain Vision Transformers
_OTHER = re.compile(
  r'beit|cait|coat|convit|crossvit|davit|efficient(former|vit)|gcvit|hiera|'
  r'levit|maxx?vit|mvit|naflexvit|nest|nextvit|pit_|pvt|repvit|samvit|'
  r'sam2_hiera|swinv2|tiny_vit|tnt|twins|visformer|vit_s?relpos|vitamin|volo|'
  r'xcit'
)
_STATISTICS: dict[str, Statistics] = {
  'half': NONE,
  'imagenet': IMAGENET,
  'clip': CLIP,
  'satellite': ((0.43, 0.411, 0.296), (0.213, 0.156, 0.143)),
  'unit': ((0.0,) * 3, (1.0,) * 3),
}


class Architecture(NamedTuple):
  """One of timm's architectures, or one set of its weights.

  Attributes:
    name: timm's name, such as 'vit_base_patch16_224.augreg_in21k'.
    block: class name of the blocks; those in `REFUSED` cannot be loaded.
    width: embedding dimension.
    depth: number of blocks.
    num_heads: number of attention heads; in the first stage for a Swin.
    gelu: 'exact', 'tanh' or 'quick'; 'none' for unsupported blocks.
    norm_eps: epsilon of LayerNorm.
    pool: timm's `global_pool`: 'token', 'avg' or 'map'.
    image_size: side of the images, pixels, or HEIGHTxWIDTH.
    final_norm: 1 if a norm follows the last block or the pooling, else 0.
    map_heads: number of heads of attention pooling if it differs, else 0.
    map_prefix: 1 if attention pooling includes the prefix tokens, else 0.
    rope: `vit.Config.rope`.
    rope_base: `vit.Config.rope_base`; 0 for none.
    rope_grid: `vit.Config.rope_grid`; 0 for none.
    rope_offset: `vit.Config.rope_offset`.
    rope_order: order of channels: 'halves' as in this package, or planes side
      by side with rows first ('rows') or columns first ('columns').
    window_size: side of the windows of a Swin in tokens; 0 for other models.
    pixels: name of the mean and standard deviation in `_STATISTICS`.
    crop_pct: side of the center crop divided by the side of the resized image.
    interpolation: filter of the resizing.
    crop_mode: 'center' or 'squash'.
  """

  name: str
  block: str
  width: int
  depth: int
  num_heads: int
  gelu: str
  norm_eps: float
  pool: str
  image_size: str
  final_norm: int
  map_heads: int
  map_prefix: int
  rope: str
  rope_base: float
  rope_grid: int
  rope_offset: float
  rope_order: str
  window_size: int
  pixels: str
  crop_pct: float
  interpolation: str
  crop_mode: str

  @property
  def statistics(self) -> Statistics:
    """Mean and standard deviation of the channels of pixels in [0, 1]."""
    return _STATISTICS.get(self.pixels, NONE)

  @property
  def size(self) -> tuple[int, int]:
    """Height and width of the images, pixels."""
    sides = [int(side) for side in self.image_size.split('x')]
    return sides[0], sides[-1]


@functools.cache
def table() -> dict[str, Architecture]:
  """Returns all rows of the table by name."""
  types = Architecture.__annotations__
  with TABLE.open(newline='') as file:
    next(file)  # the line with the version of timm
    rows = [
      Architecture(**{key: types[key](cell) for key, cell in row.items()})
      for row in csv.DictReader(file)
    ]
  return {each.name: each for each in rows}


@functools.cache
def version() -> str:
  """Returns the version of timm from which the table was written."""
  with TABLE.open() as file:
    return file.readline().split()[-1]


def source() -> str:
  """Returns the name of the table for messages."""
  return f'the table of timm {version()}'


def refusal(name: str) -> str | None:
  """Returns why models of a name are not supported; None if they may be.

  Args:
    name: timm's name, with or without a tag.
  """
  architecture = find(name)
  if architecture is None:
    return (
      'it is not a plain Vision Transformer' if _OTHER.match(name) else None
    )
  return REFUSED.get(architecture.block)


def find(name: str) -> Architecture | None:
  """Returns the architecture of a name; None if it is not in the table.

  Args:
    name: timm's name, with or without a tag; for an unknown tag, the row of the
      architecture is returned.
  """
  rows = table()
  return rows.get(name) or rows.get(name.partition('.')[0])


def num_heads(width: int, depth: int, pool: str) -> int:
  """Returns the probable number of heads of a ViT without a known architecture.

  It is that of most architectures of timm, or else of the paper, with these
  properties; for other sizes, heads have 64 channels.

  Args:
    width: embedding dimension.
    depth: number of blocks.
    pool: timm's `global_pool`.
  """
  same = collections.Counter(
    each.num_heads
    for each in table().values()
    if each.block == 'Block'
    and (each.width, each.depth, each.pool) == (width, depth, pool)
  )
  if same:
    return same.most_common(1)[0][0]
  by_width = {s['width']: s['num_heads'] for s in SIZES.values()}
  return by_width.get(width) or max(width // 64, 1)


@functools.cache
def families() -> tuple[dict[str, str], ...]:
  """Returns the rows of timm_families.csv, families of weights.

  They have the columns

  - name: name of the family.
  - pattern: regular expression for the name of a file in lower case.
  - array: regular expression for the names of arrays, used if no family's
    pattern matches the file's name.
  - preset: evaluation preprocessing, a key of `PRESETS`.
  - pixels, crop_pct, interpolation: values in place of the preset's, see
    `Architecture`; empty for the preset's.
  - position_resize: method by which the repository of the family interpolates
    positions, see `positions.METHODS`; empty for that of timm.

  The first family that matches is used, so families with more specific patterns
  come first. The last one matches nothing. Each family has the crop of its
  repository, such as 224 of 256 pixels for `dino`; `swin`, `clip` and `vit`
  have that of timm.
  """
  with FAMILIES.open(newline='') as file:
    return tuple(csv.DictReader(file))


def family_settings(
  path: str, arrays: Mapping[str, np.ndarray], image_size: tuple[int, int]
) -> dict[str, Any]:
  """Returns the defaults of the family that a file seems to belong to.

  Args:
    path: path of the file.
    arrays: arrays under their names in the file.
    image_size: (height, width) of the model, pixels.

  Returns:
    Values of `ModelMetadata`.
  """
  stem = os.path.basename(path).lower()
  by_name = [row for row in families() if re.search(row['pattern'], stem)]
  by_array = [
    row
    for row in families()
    if any(re.search(row['array'], name) for name in arrays)
  ]
  family = [*by_name, *by_array, families()[-1]][0]
  preset = PRESETS[family['preset']]
  mean, std = _STATISTICS.get(family['pixels'], preset.normalization)
  if family['crop_pct']:
    preset = preset._replace(resized_side=cropped(float(family['crop_pct'])))
  section = preset.section(image_size)
  if family['interpolation']:
    section['interpolation'] = family['interpolation']
  position_resize = family['position_resize'] or None
  if family['name'] == 'dinov2' and 'register_tokens' in arrays:
    position_resize = 'bicubic'
  return dict(
    known_from=f'the defaults of the family {family["name"]}',
    # Arrays are weak evidence: LayerScale, for example, also occurs outside of
    # DeiT-III.
    assumed=not by_name,
    gelu='quick' if 'quickgelu' in stem else 'exact',
    mean=mean,
    std=std,
    preprocess=section,
    position_resize=position_resize,
  )


def preprocess(
  image_size: tuple[int, int],
  crop_pct: float,
  interpolation: str = 'bicubic',
  crop_mode: str = 'center',
) -> dict[str, Any]:
  """Returns the config section for the preprocessing of timm's evaluation.

  Args:
    image_size: (height, width), pixels.
    crop_pct: side of the center crop divided by that of the resized image, in
      (0, 1].
    interpolation: 'bicubic' or 'bilinear'; any other is replaced by 'bicubic',
      with a warning.
    crop_mode: 'center', which keeps the aspect ratio, or 'squash'.
  """
  preset = PRESETS['timm']._replace(resized_side=cropped(crop_pct))
  section = preset.section(image_size)
  if interpolation == 'bilinear':
    section['interpolation'] = 'bilinear_antialias'
  elif interpolation != 'bicubic':
    log.warning('images are resized by bicubic, not %s', interpolation)
  if crop_mode == 'squash':
    is_whole = section['central_fraction'] == 1
    section['resize'] = 'squash' if is_whole else 'squash_central'
  return section
