"""Names of the hybrids' stem in official `.npz` files.

The rest of a hybrid has a plain Vision Transformer's names. Group norms are
stored as `[1, 1, 1, channels]`.
"""

from typing import Any

import numpy as np

from vit_jax.models.stems.resnet import stride_of
from vit_jax.weights.formats import npz_resnet

_STEM = 'stem/'
_ROOT = 'conv_root/kernel'
_PROJECTION = ('conv_proj/kernel', 'gn_proj/scale', 'gn_proj/bias')


def _names(depths: tuple[int, ...]) -> npz_resnet.Names:
  """Names by path within the stem."""
  root = (_ROOT, 'gn_root/scale', 'gn_root/bias')
  return {path: path for path in root} | npz_resnet.unit_names(
    depths,
    _PROJECTION,
    lambda stage, unit, leaf: f'block{stage}/unit{unit}/{leaf}',
  )


def take(
  path: str, arrays: dict[str, np.ndarray]
) -> tuple[dict[str, Any] | None, dict[str, np.ndarray]]:
  """Takes the stem out of a file's arrays, if there is one.

  Returns:
    The section `model.stem` (None without a stem), and {path: array} in this
    package's layout.

  Raises:
    UserError: a part of it is missing or no weights.
  """
  if _ROOT not in arrays:
    return None, {}
  depths = npz_resnet.depths(path, arrays, r'block(\d+)/unit(\d+)/')
  stem = npz_resnet.take(path, arrays, _names(depths))
  factor = npz_resnet.width_factor(path, stem[_ROOT])
  section = dict(name='resnet', depths=depths, width_factor=factor)
  return section, {_STEM + native: leaf for native, leaf in stem.items()}


def stride(section: dict[str, Any] | None) -> int:
  """Pixels for one place of a stem's map; 1 without a stem."""
  return 1 if section is None else stride_of(section['depths'])


def give(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Takes the stem's leaves out of a flat tree; {official name: array}."""
  if _STEM + _ROOT not in flat:
    return {}
  inner = {
    path.removeprefix(_STEM): flat.pop(path)
    for path in list(flat)
    if path.startswith(_STEM)
  }
  names = _names(npz_resnet.stacked_depths(inner))
  arrays = npz_resnet.give(inner, names)
  flat |= {_STEM + path: leaf for path, leaf in inner.items()}  # no such name
  return {
    name: leaf if name.endswith('kernel') else leaf.reshape(1, 1, 1, -1)
    for name, leaf in arrays.items()
  }
