"""Names of ResNets in official `.npz` files: stems of hybrids, and BiT.

The first unit of a stage is separate both here and in the files. The others,
which have equal shapes, are stacked as `layers/…` here
(`models.resnet`), and numbered from 2 in the files.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats.naming import Naming

ROOT = 'conv_root/kernel'  # first convolution of the stem of a hybrid
BIT_ROOT = 'resnet/root_block/standardized_conv2d/kernel'
_BIT_HEAD = 'resnet/head/conv2d/kernel'
_UNIT = tuple(
  f'{layer}/{leaf}'
  for i in (1, 2, 3)
  for layer, leaf in (
    (f'conv{i}', 'kernel'),
    (f'gn{i}', 'scale'),
    (f'gn{i}', 'bias'),
  )
)
# Leaves that only the first unit of a stage has.
_PROJECTION = ('conv_proj/kernel', 'gn_proj/scale', 'gn_proj/bias')
_WIDTH = 64  # channels of the root at width factor 1
_BIT_LAYERS = {'1': 'a', '2': 'b', '3': 'c'}
_BIT_LEAVES = {
  'kernel': 'standardized_conv2d/kernel',
  'scale': 'group_norm/gamma',
  'bias': 'group_norm/beta',
}


def stem_names(depths: tuple[int, ...]) -> dict[str, str]:
  """Returns the names of a hybrid's stem, {path: name}.

  Args:
    depths: number of units in each stage.
  """
  root = {f'stem/{leaf}': leaf for leaf in (ROOT, 'gn_root/scale')}
  root['stem/gn_root/bias'] = 'gn_root/bias'
  return root | _unit_names(
    'stem/',
    depths,
    _PROJECTION,
    lambda stage, unit, leaf: f'block{stage}/unit{unit}/{leaf}',
  )


def bit_naming(depths: tuple[int, ...]) -> Naming:
  """Returns the names of a BiT ResNet.

  Args:
    depths: number of units in each stage.
  """

  def name(stage: int, unit: str, leaf: str) -> str:
    layer, _, last = leaf.partition('/')
    part = 'a/proj' if layer == 'conv_proj' else _BIT_LAYERS[layer[-1]]
    # The numbers of units have two digits in BiT.
    unit = f'0{unit}' if unit == '1' else unit.replace('}', ':02}')
    return f'resnet/block{stage}/unit{unit}/{part}/{_BIT_LEAVES[last]}'

  names = {
    'conv_root/kernel': BIT_ROOT,
    'norm/scale': f'resnet/{_BIT_LEAVES["scale"]}',
    'norm/bias': f'resnet/{_BIT_LEAVES["bias"]}',
    'head/kernel': _BIT_HEAD,
    'head/bias': 'resnet/head/conv2d/bias',
    **_unit_names('', depths, ('conv_proj/kernel',), name),
  }
  return Naming(names, torch=False)


def _unit_names(
  prefix: str,
  depths: tuple[int, ...],
  first: tuple[str, ...],
  name: Callable[[int, str, str], str],
) -> dict[str, str]:
  """Returns the names of all units.

  Args:
    prefix: prefix of the paths here.
    depths: number of units in each stage.
    first: leaves that only the first unit of a stage has.
    name: function from stage, number of the unit and leaf to the name.
  """
  names = {}
  for stage, depth in enumerate(depths, start=1):
    for leaf in (*_UNIT, *first):
      names[f'{prefix}block{stage}/unit1/{leaf}'] = name(stage, '1', leaf)
    for leaf in _UNIT if depth > 1 else ():
      path = f'{prefix}block{stage}/layers/{leaf}'
      names[path] = name(stage, '{i+2}', leaf)
  return names


def section(
  path: str, arrays: Mapping[str, np.ndarray], root: str
) -> dict[str, Any]:
  """Returns the config section of a ResNet, with sizes derived from its arrays.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.
    root: name of the first convolution, `ROOT` or `BIT_ROOT`.

  Raises:
    UserError: a stage is missing, or the number of channels of the root is not
      a multiple of 64.
  """
  channels = arrays[root].shape[-1] if arrays[root].ndim else 0
  factor, remainder = divmod(channels, _WIDTH)
  if remainder or not factor:
    raise UserError(
      f'{path} contains a ResNet whose root has {channels} channels; they must '
      f'be a multiple of {_WIDTH}.'
    )
  return dict(name='resnet', depths=_depths(path, arrays), width_factor=factor)


def _depths(path: str, names: Iterable[str]) -> tuple[int, ...]:
  """Returns the number of units in each stage.

  Raises:
    UserError: a stage is missing. (Missing units are found later, because their
      arrays are missing.)
  """
  depths: dict[int, int] = {}
  pattern = r'(?:resnet/)?block(\d+)/unit(\d+)/'
  for match in filter(None, (re.match(pattern, name) for name in names)):
    stage, unit = int(match[1]), int(match[2])
    depths[stage] = max(depths.get(stage, 0), unit)
  if sorted(depths) != list(range(1, len(depths) + 1)):
    raise UserError(
      f'{path} contains the stages {sorted(depths)} of a ResNet; they must be '
      'numbered from 1 without gaps.'
    )
  return tuple(depths[stage] for stage in sorted(depths))


def stacked_depths(flat: Mapping[str, Any], prefix: str) -> tuple[int, ...]:
  """Returns the number of units in each stage of a model of this package.

  Args:
    flat: parameters of the model by path.
    prefix: prefix of the ResNet's paths, 'stem/' or ''.
  """
  starts = [path for path in flat if path.startswith(prefix)]
  count = sum(path.endswith('/unit1/conv1/kernel') for path in starts)
  rest = [
    flat.get(f'{prefix}block{i + 1}/layers/conv1/kernel') for i in range(count)
  ]
  return tuple(1 if leaf is None else 1 + len(leaf) for leaf in rest)


def flattened(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Removes dimensions of 1 from the group norms and BiT's head in a file.

  Group norms may be `[1, 1, 1, channels]`; the head is a 1x1 convolution.
  """

  def flat(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 4 and array.shape[:3] == (1, 1, 1) and '/gn' in f'/{name}':
      return array.reshape(-1)
    if name == _BIT_HEAD and array.ndim == 4 and array.shape[:2] == (1, 1):
      return array[0, 0]
    return array

  return {name: flat(name, array) for name, array in arrays.items()}


def unflattened(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Adds the dimensions of 1 that arrays in official files have."""

  def full(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 1 and '/gn' in f'/{name}':
      return array.reshape(1, 1, 1, -1)
    return array[None, None] if name == _BIT_HEAD else array

  return {name: full(name, array) for name, array in arrays.items()}
