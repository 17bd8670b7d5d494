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

from vit_jax.errors import UserError
from vit_jax.models import swin
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming, Part
from vit_jax.weights.formats.timm_models import Architecture

# Constants of the model; its config section has no keys for them.
COMPUTED = {'gelu': 'exact', 'norm_eps': swin.LN_EPSILON}
# Values of keys that are missing in the notes of older files.
UNNOTED = {'window_rule': 'authors'}
_TABLE = 'layers.0.blocks.0.attn.relative_position_bias_table'
_MASK = 'layers.0.blocks.1.attn_mask'
# Arrays that are determined by the sizes, but are stored in some files.
_DERIVED = r'.*\.(relative_position_index|attn_mask)'
_NAMES = {
  'embedding': 'patch_embed.proj',
  'embedding_norm': 'patch_embed.norm',
  'norm': 'norm',
  'head': 'head.fc',
}
_BLOCK: dict[str, str | Part] = {
  **{name: name for name in ('norm1', 'norm2')},
  **{
    f'attention/{part}': Part('attn.qkv', index, 3)
    for index, part in enumerate(('query', 'key', 'value'))
  },
  'attention/bias_table': 'attn.relative_position_bias_table',
  'attention/out': 'attn.proj',
  'mlp/fc1': 'mlp.fc1',
  'mlp/fc2': 'mlp.fc2',
}


def holds(names: Container[str]) -> bool:
  """Returns whether names are those of a Swin's arrays or parameters."""
  return _TABLE in names or 'stage1/layers/plain/norm1/scale' in names


def naming(model: Any) -> Naming:
  """Returns timm's names of a model's parameters."""
  return _naming(len(model.depths))


def _naming(stages: int) -> Naming:
  return stacked(_NAMES, _BLOCK, 'layers.', stages, merging_of=0)


def stacked(
  names: Mapping[str, str],
  block: Mapping[str, str | Part],
  layers: str,
  stages: int,
  merging_of: int,
) -> Naming:
  """Returns the names of a Swin, whose blocks are stacked in pairs here.

  Args:
    names: names outside the stages, {path: name}.
    block: names in a block, {path: name}.
    layers: prefix of the stages' names, before the index of a stage.
    stages: number of stages.
    merging_of: stage whose names contain a merging of patches: 0 for the stage
      after the merging, -1 for the stage before it.
  """
  table: dict[str, str | Part] = dict(names)
  for i in range(1, stages):
    merging = f'{layers}{i + merging_of}.downsample'
    table[f'merge{i}'] = f'{merging}.reduction'
    table[f'merge{i}/norm'] = f'{merging}.norm'
  for i in range(stages):
    for kind, number in (('plain', '{2i}'), ('shifted', '{2i+1}')):
      here = f'stage{i + 1}/layers/{kind}/'
      there = f'{layers}{i}.blocks.{number}.'
      for path, name in block.items():
        if isinstance(name, Part):
          table[here + path] = name._replace(name=there + name.name)
        else:
          table[here + path] = there + name
  return Naming(table, torch=True)


def completed(
  model: Any, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the arrays unchanged, because timm's model has no others."""
  del model
  return arrays


def unshown(model: Any) -> dict[str, Any]:
  """Returns the settings of a model that its arrays do not determine."""
  return {'window_size': model.window_size, 'window_rule': model.window_rule}


def describe(
  path: str,
  arrays: Mapping[str, np.ndarray],
  config: Mapping[str, Any],
  architecture: Architecture | None = None,
) -> Described:
  """Describes the model of a file, given its arrays and settings.

  The image size is that of the config; or else that of the attention masks in
  the authors' files; or else the one whose last map is a single window, as in
  all published models.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
    config: timm's config.json; {} if there is none.
    architecture: specified architecture; not used, because the arrays determine
      all sizes.

  Raises:
    UserError: the arrays are not those of a Swin, or contradict the settings.
  """
  del architecture
  original, arrays = arrays, _renamed(arrays)
  keys = _keys(path, arrays)
  # If a map is smaller than a window, its bias table has the size of the map,
  # and only the settings contain the size of the window.
  args = config.get('model_args', {})
  keys['window_size'] = args.get('window_size', keys['window_size'])
  rule = 'authors' if _of_authors(original) else 'timm'
  if args.get('window_rule', rule) == 'timm':
    keys['window_rule'] = 'timm'
  size = config.get('pretrained_cfg', {}).get('input_size', (3, 0, 0))[1:]
  if not any(size):
    last = len(keys['depths']) - 1
    table = arrays.get(
      _TABLE.replace('layers.0', f'layers.{last}'), original[_TABLE]
    )
    side = _window(table) * swin.PATCH_SIZE * 2**last
    if _MASK in original:
      windows = round(len(original[_MASK]) ** 0.5)
      side = windows * keys['window_size'] * swin.PATCH_SIZE
    size = side, side
  names = _naming(len(keys['depths']))
  return Described(arrays, names, keys, tuple(size), COMPUTED, swin.LN_EPSILON)


def assumptions(
  found: Described,
  config: Mapping[str, Any],
  architecture: Architecture | None,
  gelu: str,
) -> list[str]:
  """Returns [], because the arrays of a Swin determine heads and windows."""
  del found, config, architecture, gelu
  return []


def _of_authors(names: Container[str]) -> bool:
  """Returns whether names are those of the authors' repository."""
  return 'layers.0.downsample.reduction.weight' in names


def _renamed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns arrays with timm's names, except those that sizes determine."""
  aliases: list[tuple[str, Any]] = [(r'^head\.(weight|bias)$', r'head.fc.\1')]
  if _of_authors(arrays):  # the authors' stages end with a merging of patches
    aliases.append((r'layers\.(\d+)\.downsample', _next_stage))
  renamed = naming_lib.renamed(arrays, aliases)
  return {k: v for k, v in renamed.items() if not re.fullmatch(_DERIVED, k)}


def _next_stage(match: re.Match[str]) -> str:
  return f'layers.{int(match[1]) + 1}.downsample'


def _keys(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Returns the model's sizes.

  Raises:
    UserError: the patches or the numbers of blocks are not those of a Swin.
  """
  matches = [re.match(r'layers\.(\d+)\.blocks\.(\d+)\.', k) for k in arrays]
  numbers = {(int(match[1]), int(match[2])) for match in matches if match}
  stages = 1 + max(stage for stage, _ in numbers)
  depths = tuple(sum(s == stage for s, _ in numbers) for stage in range(stages))
  patches = arrays.get('patch_embed.proj.weight', np.zeros(()))
  square = (3, swin.PATCH_SIZE, swin.PATCH_SIZE)
  if patches.shape[1:] != square or any(d < 2 or d % 2 for d in depths):
    raise UserError(
      f'{path} does not contain a Swin Transformer, which has patches of '
      f'{list(square)} in patch_embed.proj.weight and an even number of blocks '
      f'in each stage: patches are {list(patches.shape)} and blocks '
      f'{list(depths)}.'
    )
  table = arrays[_TABLE]
  return dict(
    name='swin',
    width=patches.shape[0],
    depths=depths,
    num_heads=table.shape[-1] if table.ndim else 1,
    window_size=_window(table),
  )


def _window(table: np.ndarray) -> int:
  """Returns the side of the windows of a bias table, in tokens."""
  return swin.window_of(len(table) if table.ndim else 1)
