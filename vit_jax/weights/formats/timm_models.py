"""Properties of timm's architectures that arrays of a file do not determine.

The values are in `timm_table.csv`, which tests/weights/write_timm_table.py
writes from an installation of timm. A row with a dot in its name is a set of
weights whose evaluation differs from that of the first set of its architecture.
"""

import csv
import functools
import os
import pathlib
from typing import NamedTuple

from vit_jax.data.augment.presets import IMAGENET, NONE
from vit_jax.weights.formats.normalization import CLIP

TABLE = pathlib.Path(__file__).with_name('timm_table.csv')
# Blocks that the models of this package support.
SUPPORTED = ('Block', 'Swin')
_STATISTICS = {
  'half': NONE,
  'imagenet': IMAGENET,
  'clip': CLIP,
  'unit': ((0.0,) * 3, (1.0,) * 3),
}


class Architecture(NamedTuple):
  """One of timm's architectures, or one set of its weights.

  Attributes:
    name: timm's name, such as 'vit_base_patch16_224.augreg_in21k'.
    block: class name of the blocks; only `SUPPORTED` ones can be loaded.
    width: embedding dimension.
    depth: number of blocks.
    num_heads: number of attention heads; in the first stage for a Swin.
    gelu: 'exact', 'tanh' or 'quick'; 'none' for unsupported blocks.
    norm_eps: epsilon of LayerNorm.
    pool: timm's `global_pool`: 'token', 'avg' or 'map'.
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
  window_size: int
  pixels: str
  crop_pct: float
  interpolation: str
  crop_mode: str

  @property
  def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the channels of pixels in [0, 1]."""
    return _STATISTICS.get(self.pixels, NONE)


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


def find(name: str) -> Architecture | None:
  """Returns the architecture of a name; None if it is not in the table.

  Args:
    name: timm's name, with or without a tag; for an unknown tag, the row of the
      architecture is returned.
  """
  rows = table()
  return rows.get(name) or rows.get(name.partition('.')[0])


def of_file(path: str) -> Architecture | None:
  """Returns the architecture that the name of a file specifies, or None."""
  return find(os.path.splitext(os.path.basename(path))[0])


def candidates(
  width: int, depth: int, patch_size: int, pool: str
) -> list[Architecture]:
  """Returns the supported architectures of these sizes.

  Args:
    width: embedding dimension.
    depth: number of blocks.
    patch_size: side of a patch, pixels; timm's names contain it.
    pool: timm's `global_pool`.
  """
  return [
    each
    for each in table().values()
    if each.block == 'Block'
    and (each.width, each.depth, each.pool) == (width, depth, pool)
    and (f'patch{patch_size}_' in each.name or 'patch' not in each.name)
  ]


def source() -> str:
  """Returns the name of the table for messages."""
  return f'the table of timm {version()}'
