"""Converts parameters to and from the names of another project.

"There" means in the other project, and "here" in this package. A naming is a
table `{path here: name there}`. A path is that of a leaf, or that of a module,
whose leaves have corresponding names there ('kernel' is 'weight' in PyTorch). A
name with `{i}` stands for one array per layer; these arrays are stacked here.
`{2i}` and `{2i+1}` number the even and the odd layers, and `{i+2:02}` counts
from 2 in two digits. `Part` is one of several arrays (query, key and value)
that are joined there along the first axis.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError

_NUMBER = re.compile(
  r'\{(?P<step>\d*)i(?:\+(?P<first>\d+))?(?::0(?P<digits>\d))?\}'
)
_TORCH_LEAVES = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'}


class ShapeError(UserError):
  """The arrays of a file are not those of the model."""


class Part(NamedTuple):
  """One of several arrays that are joined under one name.

  Attributes:
    name: name of the joined array.
    index: index of this array among the joined ones.
    count: number of joined arrays.
  """

  name: str
  index: int
  count: int


class Naming(NamedTuple):
  """Names of the parameters in another project.

  Attributes:
    names: {path of a leaf or a module: its name there}.
    torch: whether matrices are `[outputs, inputs]` and leaves have PyTorch's
      names; otherwise arrays have the layout used here, and names are paths.
  """

  names: Mapping[str, str | Part]
  torch: bool

  def part(self, path: str) -> Part | None:
    """Returns the name of a leaf; None if it has no name."""
    module, _, leaf = path.rpartition('/')
    ending = ''
    if path in self.names:
      entry = self.names[path]
    elif module in self.names:
      entry = self.names[module]
      ending = '.' + _TORCH_LEAVES[leaf] if self.torch else f'/{leaf}'
    else:
      return None
    name, index, count = entry if isinstance(entry, Part) else (entry, 0, 1)
    return Part(name + ending, index, count)


def renamed(
  arrays: Mapping[str, np.ndarray], aliases: Iterable[tuple[str, Any]]
) -> dict[str, np.ndarray]:
  """Returns arrays, with older names replaced by current ones.

  Args:
    arrays: arrays under current or older names.
    aliases: pairs of a regular expression and its replacement (see `re.sub`),
      applied one after the other.
  """
  result = {}
  for name, array in arrays.items():
    for pattern, replacement in aliases:
      name = re.sub(pattern, replacement, name)
    result[name] = array
  return result


def export(
  flat: Mapping[str, np.ndarray], naming: Naming
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, array) with the names and the layout of another project.

  Args:
    flat: all parameters, {path: array}.
    naming: names in the project.

  Raises:
    UserError: some parameters have no name there; the message lists them.
  """
  joined: dict[str, dict[int, str]] = {}
  nameless = []
  for path in flat:
    part = naming.part(path)
    if part is None:
      nameless.append(path)
    else:
      joined.setdefault(part.name, {})[part.index] = path
  if nameless:
    raise UserError(
      'this format has no names for these parameters of the model: '
      f'{", ".join(nameless)}. Write another format, or a directory of '
      'vit_jax, which can contain every model.'
    )
  for name, paths in joined.items():
    stacked = _NUMBER.search(name) is not None
    layers = len(flat[paths[0]]) if stacked else 1
    for i in range(layers):
      arrays = [
        _there(path, flat[path][i] if stacked else flat[path], naming)
        for path in (paths[index] for index in sorted(paths))
      ]
      array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
      yield _numbered(name, i), np.ascontiguousarray(array)


def _numbered(name: str, i: int) -> str:
  """Returns the name of array `i` of a stack."""

  def number(match: re.Match[str]) -> str:
    value = int(match['step'] or 1) * i + int(match['first'] or 0)
    return str(value).zfill(int(match['digits'] or 0))

  return _NUMBER.sub(number, name)


def shapes(
  expected: Mapping[str, tuple[int, ...]], naming: Naming
) -> dict[str, tuple[int, ...]]:
  """Returns {name there: shape there} for parameters of these shapes here.

  Args:
    expected: shapes here, {path: shape}.
    naming: names in the project.
  """
  # Arrays of any shape occupy no memory if their strides are 0.
  zeros = {
    path: np.broadcast_to(np.int8(0), shape) for path, shape in expected.items()
  }
  return {name: array.shape for name, array in export(zeros, naming)}


def check(
  path: str,
  actual: Mapping[str, tuple[int, ...]],
  expected: Mapping[str, tuple[int, ...]],
) -> None:
  """Checks that a file contains the arrays of a model, with their shapes.

  Args:
    path: path of the file, for messages.
    actual: shapes in the file, {name: shape}.
    expected: shapes in the model, {name: shape}.

  Raises:
    ShapeError: arrays are missing, unknown or have another shape; the message
      lists all of them.
  """
  rows: dict[tuple[str, Any, Any], list[int]] = {}
  for name in sorted({*actual, *expected}):
    pair = actual.get(name), expected.get(name)
    if pair[0] != pair[1]:
      # In the message, arrays that differ only in the layer's number share a
      # line.
      layer = re.search(r'(?<=[._/])\d+(?=[./])', name)
      at = int(layer[0]) if layer else -1
      if layer:
        name = f'{name[: layer.start()]}*{name[layer.end() :]}'
      rows.setdefault((name, *pair), []).append(at)
  if not rows:
    return
  lines = [
    f'  {_with_layers(name, layers)}: '
    f'{_shown(in_file, "missing")} in the file, '
    f'{_shown(in_model, "none")} in the model'
    for (name, in_file, in_model), layers in rows.items()
  ]
  raise ShapeError(
    f'{path} does not contain the parameters of the model that its arrays '
    'describe:\n'
    + '\n'.join(lines)
    + '\nSupported are ViT (also of DeiT, MAE, '
    'DINO, DINOv2 and CLIP), hybrids, BiT and Swin; other models, and variants '
    'with other arrays, cannot be read.'
  )


def _with_layers(name: str, layers: list[int]) -> str:
  """Returns a name with '*' replaced by the numbers of layers."""
  if layers == [-1]:
    return name
  layers = sorted(layers)
  first, last = layers[0], layers[-1]
  if len(layers) > 2 and layers == [*range(first, last + 1)]:
    return name.replace('*', f'{{{first}..{last}}}')
  text = ','.join(map(str, layers))
  return name.replace('*', text if len(layers) == 1 else f'{{{text}}}')


def _shown(shape: tuple[int, ...] | None, absent: str) -> str:
  return absent if shape is None else str(list(shape))


def native(
  arrays: Mapping[str, np.ndarray],
  expected: Mapping[str, tuple[int, ...]],
  naming: Naming,
) -> dict[str, np.ndarray]:
  """Returns parameters with the paths and the layout used here, as float32.

  Args:
    arrays: arrays {name there: array} of the shapes that `shapes` returns.
    expected: shapes {path: shape} of all parameters of the model.
    naming: names in the project.
  """
  return {
    path: _native_leaf(arrays, path, shape, naming)
    for path, shape in expected.items()
  }


def _native_leaf(
  arrays: Mapping[str, np.ndarray],
  path: str,
  shape: tuple[int, ...],
  naming: Naming,
) -> np.ndarray:
  part = naming.part(path)
  assert part is not None, path  # or `shapes` would have raised

  def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
    array = np.split(arrays[name], part.count)[part.index]
    with np.errstate(over='ignore'):  # infinity is reported after loading
      array = np.asarray(array, np.float32)
    return _here(path, array, shape, naming)

  if not _NUMBER.search(part.name):
    return take(part.name, shape)
  names = (_numbered(part.name, i) for i in range(shape[0]))
  return np.stack([take(name, shape[1:]) for name in names])


def _there(path: str, array: np.ndarray, naming: Naming) -> np.ndarray:
  """Returns an array of one layer in the layout of the other project."""
  if not naming.torch:
    return array
  if path == 'embedding/kernel':  # [p, p, c, d] to [d, c, p, p]
    return array.transpose(3, 2, 0, 1)
  if re.search(r'(attention/(query|key|value)|fc1)/kernel$', path):
    return array.reshape(array.shape[0], -1).T  # from [d, h, d/h]
  if re.search(r'(attention/(query|key|value)|fc1)/bias$', path):
    return array.reshape(-1)  # from [h, d/h]
  if path.endswith('attention/out/kernel'):  # from [h, d/h, d]
    return array.reshape(-1, array.shape[-1]).T
  return array.T if path.endswith('/kernel') else array


def _here(
  path: str, array: np.ndarray, shape: tuple[int, ...], naming: Naming
) -> np.ndarray:
  """Returns an array in the layout used here; the inverse of `_there`."""
  if not naming.torch:
    return array
  if path == 'embedding/kernel':
    return array.transpose(2, 3, 1, 0)
  return (array.T if path.endswith('/kernel') else array).reshape(shape)


def check_floats(path: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Checks that arrays are floating-point numbers of at least 16 bits.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file by name.

  Raises:
    UserError: some have another dtype; the message lists them.
  """
  others = {
    name: array.dtype
    for name, array in arrays.items()
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.itemsize < 2
  }
  if others:
    raise UserError(
      f'{path} contains arrays that are not floating-point numbers of at least '
      '16 bits: '
      + ', '.join(f'{name} ({dtype})' for name, dtype in others.items())
      + '. Quantized weights cannot be read: use the original ones.'
    )
