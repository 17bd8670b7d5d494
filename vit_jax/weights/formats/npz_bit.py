"""Official `.npz` weights of BiT's ResNets (TensorFlow names)."""

from typing import Any

import numpy as np

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.weights.formats import npz_arrays, npz_resnet

PyTree = Any
IMAGE_SIZE = (224, 224)  # any size fits; that of pre-training
_ROOT = 'resnet/root_block/standardized_conv2d/kernel'
_HEAD = 'resnet/head/conv2d'
_LAYERS = {'1': 'a', '2': 'b', '3': 'c'}
_LEAVES = {
  'kernel': 'standardized_conv2d/kernel',
  'scale': 'group_norm/gamma',
  'bias': 'group_norm/beta',
}


def _unit(stage: int, unit: int, leaf: str) -> str:
  """'…/block1/unit02/a/group_norm/gamma' for 'gn1/scale'."""
  layer, _, last = leaf.partition('/')
  place = 'a/proj' if layer == 'conv_proj' else _LAYERS[layer[-1]]
  return f'resnet/block{stage}/unit{unit:02d}/{place}/{_LEAVES[last]}'


def _names(depths: tuple[int, ...]) -> npz_resnet.Names:
  """Names of all but the head."""
  return {
    'conv_root/kernel': _ROOT,
    'norm/scale': f'resnet/{_LEAVES["scale"]}',
    'norm/bias': f'resnet/{_LEAVES["bias"]}',
    **npz_resnet.unit_names(depths, ('conv_proj/kernel',), _unit),
  }


def holds(arrays: dict[str, np.ndarray]) -> bool:
  """Whether a file's arrays are a BiT ResNet's."""
  return _ROOT in arrays


def read(
  path: str, arrays: dict[str, np.ndarray]
) -> tuple[dict[str, Any], int, PyTree]:
  """A file's arrays in this package's layout.

  Returns:
    The section `model`, the number of classes (0 without a head) and the
    parameters, float32 numpy arrays.

  Raises:
    UserError: an array is missing, is no weights, or has no place.
  """
  depths = npz_resnet.depths(path, arrays, r'resnet/block(\d+)/unit(\d+)/')
  flat = npz_resnet.take(path, arrays, _names(depths))
  if f'{_HEAD}/kernel' in arrays:
    head = {'head/kernel': f'{_HEAD}/kernel', 'head/bias': f'{_HEAD}/bias'}
    flat |= npz_resnet.take(path, arrays, dict(head))
    kernel = flat['head/kernel']  # [1, 1, channels, classes]
    flat['head/kernel'] = kernel.reshape(-1, kernel.shape[-1])
  if arrays:
    raise UserError(npz_arrays.no_place(path, arrays, 'a BiT ResNet'))
  factor = npz_resnet.width_factor(path, flat['conv_root/kernel'])
  section = dict(name='resnet', depths=depths, width_factor=factor)
  classes = flat['head/bias'].size if 'head/bias' in flat else 0
  return section, classes, tree.unflatten(flat)


def fits(flat: dict[str, np.ndarray]) -> bool:
  """Whether a flat tree is a ResNet's."""
  return 'block1/unit1/conv1/kernel' in flat


def give(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Takes a ResNet's leaves out of a flat tree; {official name: array}."""
  names = _names(npz_resnet.stacked_depths(flat))
  arrays = npz_resnet.give(flat, names)
  if 'head/kernel' in flat:
    arrays[f'{_HEAD}/kernel'] = flat.pop('head/kernel')[None, None]
    arrays[f'{_HEAD}/bias'] = flat.pop('head/bias')
  return arrays
