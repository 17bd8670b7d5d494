"""Swin Transformers with the names of timm and of the authors' repository.

The two differ in the index of the layers that merge patches (in timm the first
layer of a stage, in the authors' code the last layer of the stage before) and
in the name of the head. Both can be read; timm's current names are written.

The two also differ in how they treat maps that windows do not fill. The model's
key `window_rule` is set to the rule of the project that the file is from.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from vit_jax.models.swin import LN_EPSILON, PATCH_SIZE, window_of
from vit_jax.weights import names as names_lib
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import NameMap

# Constants of the model; its config section has no keys for them.
CONSTANTS = {'gelu': 'exact', 'norm_eps': LN_EPSILON}
_TABLE = 'layers.0.blocks.0.attn.relative_position_bias_table'
_MASK = 'layers.0.blocks.1.attn_mask'
# Arrays that are determined by the sizes, but are stored in some files.
_DERIVED = r'.*\.(relative_position_index|attn_mask)'
NAMES = NameMap(names_lib.table('swin'))


def is_swin(names: Container[str]) -> bool:
  """Returns whether names are those of a Swin's arrays or parameters."""
  return _TABLE in names or 'stage1/layers/plain/norm1/scale' in names


def parse(
  path: str,
  arrays: Mapping[str, np.ndarray],
  args: Mapping[str, Any],
  image_size: tuple[int, int] | None,
) -> ParsedWeights:
  """Parses a file, given its arrays and settings.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
    args: `window_size` and `window_rule`, where settings contain them.
    image_size: (height, width) according to the settings, pixels. By default,
      it is that of the attention masks in the authors' files; or else the one
      whose last map is a single window, as in all published models.

  Raises:
    UserError: the arrays are not those of a Swin.
  """
  of_authors = 'layers.0.downsample.reduction.weight' in arrays
  original, arrays = arrays, _renamed(arrays, of_authors)  # without masks
  model = _sizes(path, arrays)
  # If a map is smaller than a window, its bias table has the size of the map,
  # and only the settings contain the size of the window.
  model['window_size'] = args.get('window_size', model['window_size'])
  rule = 'authors' if of_authors else 'timm'
  model['window_rule'] = args.get('window_rule', rule)
  if image_size is None:
    if _MASK in original:  # [windows of the first map, W², W²]
      windows = round(len(original[_MASK]) ** 0.5)  # in a row
      side = windows * model['window_size']
    else:
      last = len(model['depths']) - 1
      last_name = _TABLE.replace('layers.0', f'layers.{last}')
      last_table = arrays.get(last_name, arrays[_TABLE])
      # Each stage after the first one halves the sides of the map.
      side = _window(last_table) * 2**last
    image_size = (side * PATCH_SIZE,) * 2
  metadata = ModelMetadata(
    image_size,
    norm_eps=LN_EPSILON,
    position_resize='bicubic_no_antialias',
  )
  return ParsedWeights(arrays, NAMES, model, metadata, CONSTANTS)


def _renamed(
  arrays: Mapping[str, np.ndarray], of_authors: bool
) -> dict[str, np.ndarray]:
  """Returns the arrays with timm's names that sizes do not determine."""
  aliases: list[tuple[str, Any]] = [(r'^head\.(weight|bias)$', r'head.fc.\1')]
  if of_authors:  # the authors' stages end with a merging of patches

    def next_stage(match: re.Match[str]) -> str:
      return f'layers.{int(match[1]) + 1}.downsample'

    aliases.append((r'layers\.(\d+)\.downsample', next_stage))
  renamed = names_lib.renamed(arrays, aliases)
  return {k: v for k, v in renamed.items() if not re.fullmatch(_DERIVED, k)}


def _sizes(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Returns the model's sizes.

  Raises:
    UserError: the patch embedding is not that of a Swin.
  """
  table = names_lib.shape_of(path, arrays, _TABLE, 2, 'a Swin')
  matches = [re.match(r'layers\.(\d+)\.blocks\.(\d+)\.', k) for k in arrays]
  # (stage, block) of all blocks
  blocks = {(int(match[1]), int(match[2])) for match in matches if match}
  stages = 1 + max(stage for stage, _ in blocks)
  depths = tuple(
    sum(of == stage for of, _ in blocks) for stage in range(stages)
  )
  name = 'patch_embed.proj.weight'
  width, channels, *_ = names_lib.shape_of(path, arrays, name, 4, 'a Swin')
  return dict(
    name='swin',
    channels=channels,
    width=width,
    depths=depths,
    num_heads=table[-1],
    window_size=window_of(table[0]),
  )


def _window(table: np.ndarray) -> int:
  """Returns the side of the windows of a bias table, in tokens."""
  return window_of(len(table) if table.ndim else 1)
