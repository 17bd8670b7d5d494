"""Parameters of one architecture under the names of another project.

A table `{path here: name there}` says it all: a path is a leaf's, or that of a
module whose leaves keep their kinds ('kernel' is 'weight' in PyTorch). A name
with `{i}` stands for one array a layer, which are stacked here, with `{2i}` or
`{2i+1}` for one of every other layer; `Part` for one of several that are joined
there along the first axis (query, key and value).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError

_NUMBER = re.compile(r'\{(?P<step>\d*)i(?:\+(?P<first>\d+))?\}')
_TORCH_LEAVES = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'}


class Part(NamedTuple):
  """One of several arrays that are joined under one name."""

  name: str
  index: int
  count: int


class Naming(NamedTuple):
  """How a project calls the parameters.

  Attributes:
    names: {path of a leaf or a module: its name there}.
    torch: whether matrices are `[outputs, inputs]` and leaves have PyTorch's
      names; otherwise arrays are as here, and names as paths.
  """

  names: Mapping[str, str | Part]
  torch: bool

  def part(self, path: str) -> Part | None:
    """What a leaf is called; None if there is no name for it."""
    module, _, leaf = path.rpartition('/')
    ending = ''
    if path in self.names:
      found = self.names[path]
    elif module in self.names:
      found = self.names[module]
      ending = '.' + _TORCH_LEAVES[leaf] if self.torch else f'/{leaf}'
    else:
      return None
    name, index, count = found if isinstance(found, Part) else (found, 0, 1)
    return Part(name + ending, index, count)


def export(
  flat: Mapping[str, np.ndarray], naming: Naming
) -> Iterator[tuple[str, np.ndarray]]:
  """Parameters under the names of another project, one after the other.

  Args:
    flat: {path: array} of all parameters.
    naming: of the project.

  Raises:
    UserError: some have no name there; lists them.
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
      f'{", ".join(nameless)}. Write another format, or a directory of our '
      'own, which holds every model.'
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
  """The name of array `i` of a stack."""

  def number(found: re.Match[str]) -> str:
    return str(int(found['step'] or 1) * i + int(found['first'] or 0))

  return _NUMBER.sub(number, name)


def shapes(
  wanted: Mapping[str, tuple[int, ...]], naming: Naming
) -> dict[str, tuple[int, ...]]:
  """{name there: shape there} of parameters with these shapes here."""
  zeros = {
    path: np.broadcast_to(np.int8(0), shape) for path, shape in wanted.items()
  }
  return {name: array.shape for name, array in export(zeros, naming)}


def check(
  path: str,
  came: Mapping[str, tuple[int, ...]],
  wanted: Mapping[str, tuple[int, ...]],
) -> None:
  """Compares shapes by name.

  Raises:
    UserError: a table of all that is missing, too many or of another shape.
  """
  rows: dict[tuple[str, Any, Any], list[int]] = {}
  for name in sorted({*came, *wanted}):
    pair = came.get(name), wanted.get(name)
    if pair[0] != pair[1]:
      layer = re.search(r'(?<=[._/])\d+(?=[./])', name)
      at = int(layer[0]) if layer else -1
      if layer:
        name = f'{name[: layer.start()]}*{name[layer.end() :]}'
      rows.setdefault((name, *pair), []).append(at)
  if not rows:
    return
  lines = [
    f'  {_with_layers(name, layers)}: '
    f'{_shown(has, "missing")} in the file, {_shown(want, "none")} in the model'
    for (name, has, want), layers in rows.items()
  ]
  raise UserError(
    f'{path} does not hold the parameters of the model that its arrays '
    'describe:\n' + '\n'.join(lines) + '\nIt may be damaged, or of a model '
    'that is not known here.'
  )


def _with_layers(name: str, layers: list[int]) -> str:
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
  wanted: Mapping[str, tuple[int, ...]],
  naming: Naming,
) -> dict[str, np.ndarray]:
  """Parameters under their paths here, float32.

  Args:
    arrays: {name there: array}, of the shapes that `shapes` gives.
    wanted: {path: shape} of all parameters of the model.
    naming: of the project.
  """
  return {
    path: _native_leaf(arrays, path, shape, naming)
    for path, shape in wanted.items()
  }


def _native_leaf(
  arrays: Mapping[str, np.ndarray],
  path: str,
  shape: tuple[int, ...],
  naming: Naming,
) -> np.ndarray:
  part = naming.part(path)
  assert part is not None, path  # `shapes` has named them all

  def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
    array = np.split(arrays[name], part.count)[part.index]
    with np.errstate(over='ignore'):  # to infinity, which is refused later
      array = np.asarray(array, np.float32)
    return _here(path, array, shape, naming)

  if not _NUMBER.search(part.name):
    return take(part.name, shape)
  names = (_numbered(part.name, i) for i in range(shape[0]))
  return np.stack([take(name, shape[1:]) for name in names])


def _there(path: str, array: np.ndarray, naming: Naming) -> np.ndarray:
  """An array of one layer as the other project keeps it."""
  if not naming.torch:
    return array
  if path == 'embedding/kernel':  # [p, p, c, d] to [d, c, p, p]
    return array.transpose(3, 2, 0, 1)
  if re.search(r'(attention/(query|key|value)|fc1)/kernel$', path):
    return array.reshape(array.shape[0], -1).T  # of [d, h, d/h]
  if re.search(r'(attention/(query|key|value)|fc1)/bias$', path):
    return array.reshape(-1)  # of [h, d/h]
  if path.endswith('attention/out/kernel'):  # [h, d/h, d]
    return array.reshape(-1, array.shape[-1]).T
  return array.T if path.endswith('/kernel') else array


def _here(
  path: str, array: np.ndarray, shape: tuple[int, ...], naming: Naming
) -> np.ndarray:
  """The inverse of `_there`."""
  if not naming.torch:
    return array
  if path == 'embedding/kernel':
    return array.transpose(2, 3, 1, 0)
  return (array.T if path.endswith('/kernel') else array).reshape(shape)


def check_floats(path: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Raises UserError for arrays that are no floating-point numbers."""
  others = {
    name: array.dtype
    for name, array in arrays.items()
    if not jnp.issubdtype(array.dtype, jnp.floating)
  }
  if others:
    raise UserError(
      f'{path} holds arrays that are no floating-point numbers: '
      + ', '.join(f'{name} ({dtype})' for name, dtype in others.items())
      + '. Weights that were quantised cannot be read: take the originals.'
    )
