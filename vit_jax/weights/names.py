"""Converts parameters to and from the names and the layout of other projects.

A `NameMap` contains a table `{native path: foreign name}`. A native path is
that of a leaf, or of a module whose leaves have corresponding names in the
other project ('kernel' is 'weight' in PyTorch). Names contain placeholders:

- `{i}` in a foreign name is the number of a layer. The file contains one array
  for each layer; in this package, they are stacked. `{2i}` and `{2i+1}` number
  the even and the odd layers, and `{i+2:02}` counts from 2 in two digits.
- `{s}` in a path is the number of a stage of a ResNet or a Swin. It replaces
  `{s}` in the foreign name; `{s-1}` is the number before it.

names.csv contains the names of Vision Transformers in all projects (also of
MAE's decoder and of text towers), of the residual units of a hybrid's stem
(`hybrid`), of BiT's ResNets (`bit`) and of Swins in timm (`swin`). The first
unit of a stage of a ResNet is separate both here and in the files. The others,
which have equal shapes, are stacked as `layers/…` here, and numbered from 2 in
the files. Columns named for a type of models in transformers contain the names
of matrices in its memory (since its major version 5), which differ from those
in files. aliases.csv contains regular expressions that replace other names.
"""

import csv
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError

T = TypeVar('T')
_NUMBER = re.compile(
  r'\{(?P<step>\d*)i(?:\+(?P<first>\d+))?(?::0(?P<digits>\d))?\}'
)
_TORCH_LEAVES = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'}
_PATCHES = 'embedding/kernel'
_STAGE = re.compile(r'(block|stage|merge)(\d+)')


def not_writable(what: str) -> UserError:
  """Returns the error for a model that a format of files cannot contain.

  Args:
    what: property of the model, which follows "a model with".
  """
  return UserError(
    f'this format cannot contain a model with {what}: write a directory of '
    'vit_jax, which can contain every model.'
  )


class Joined(NamedTuple):
  """One of several arrays that a file joins along the first axis.

  Attributes:
    name: name of the joined array.
    index: index of this array among the joined ones.
    count: number of joined arrays.
  """

  name: str
  index: int = 0
  count: int = 1


def joined(entry: str | Joined) -> Joined:
  """Returns an entry of a table; a plain name is that of a single array."""
  return entry if isinstance(entry, Joined) else Joined(entry)


@functools.cache
def table(project: str) -> dict[str, Joined]:
  """Returns the names of a Vision Transformer's parameters in a project.

  Args:
    project: name of a column of names.csv. A cell 'NAME (2 of 3)' stands for
      the second of three arrays that are joined as NAME.
  """
  result = {}
  for row in _rows('names.csv'):
    cell = row[project]
    if part := re.fullmatch(r'(.+) \((\d) of (\d)\)', cell):
      index, count = int(part[2]) - 1, int(part[3])
      result[row['path']] = Joined(part[1], index, count)
    elif cell:
      result[row['path']] = Joined(cell)
  return result


@functools.cache
def aliases(project: str) -> tuple[tuple[str, str], ...]:
  """Returns the aliases of a project's names, for `renamed`.

  Args:
    project: cell of the column `project` of aliases.csv: `transformers`, and
      `Swin of transformers`;
      `authors` for repositories whose weights timm converts; or `torchvision
      and open_clip`, whose names are replaced by those of timm.
  """
  return tuple(
    (row['pattern'], row['replacement'])
    for row in _rows('aliases.csv')
    if row['project'] == project
  )


def _rows(name: str) -> list[dict[str, str]]:
  """Returns the rows of a table next to this file."""
  with pathlib.Path(__file__).with_name(name).open(newline='') as file:
    return list(csv.DictReader(file))


class NameMap(NamedTuple):
  """Names of the parameters in another project.

  Attributes:
    names: {native path of a leaf or a module: foreign name}.
    torch: whether matrices are `[outputs, inputs]` and leaves have PyTorch's
      names; otherwise arrays have the native layout, and names are paths.
  """

  names: Mapping[str, str | Joined]
  torch: bool = True

  def find(self, path: str) -> Joined | None:
    """Returns the foreign name of a leaf; None if it has no name."""
    stage = _STAGE.search(path)
    if stage:
      path = path.replace(stage[0], stage[1] + '{s}')
    module, _, leaf = path.rpartition('/')
    ending = ''
    if path in self.names:
      entry = self.names[path]
    elif module in self.names:
      entry = self.names[module]
      ending = '.' + _TORCH_LEAVES[leaf] if self.torch else f'/{leaf}'
    else:
      return None
    entry = joined(entry)
    name = entry.name + ending
    if stage:
      name = name.replace('{s}', stage[2])
      name = name.replace('{s-1}', str(int(stage[2]) - 1))
    return entry._replace(name=name)

  def first(self, path: str) -> str | None:
    """Returns the foreign name of a leaf; for stacked layers, of the first."""
    entry = self.find(path)
    return None if entry is None else _numbered(entry.name, 0)

  def export(
    self, flat: Mapping[str, np.ndarray]
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) with the foreign names and layout.

    Args:
      flat: all parameters, {path: array}.

    Raises:
      UserError: some parameters have no foreign name; the message lists them.
    """
    # {foreign name: {index among the joined arrays: native path}}
    groups: dict[str, dict[int, str]] = {}
    nameless = []
    for path in flat:
      entry = self.find(path)
      if entry is None:
        nameless.append(path)
      else:
        groups.setdefault(entry.name, {})[entry.index] = path
    if nameless:
      more = f' and {len(nameless) - 3} more' if len(nameless) > 3 else ''
      shown = f'{", ".join(nameless[:3])}{more}'
      raise not_writable(f'{shown}, for which it has no names')
    for name, paths in groups.items():
      stacked = _NUMBER.search(name) is not None
      for i in range(len(flat[paths[0]]) if stacked else 1):
        parts = []  # arrays of layer i that the file joins
        for _, path in sorted(paths.items()):
          array = flat[path][i] if stacked else flat[path]
          parts.append(self._foreign(path, array))
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        yield _numbered(name, i), np.ascontiguousarray(whole)

  def shapes(
    self, expected: Mapping[str, tuple[int, ...]]
  ) -> dict[str, tuple[int, ...]]:
    """Returns {foreign name: shape} for parameters of the given shapes.

    Args:
      expected: {native path: shape}.
    """
    # Arrays of any shape occupy no memory if their strides are 0.
    zeros = {
      path: np.broadcast_to(np.int8(0), shape)
      for path, shape in expected.items()
    }
    return {name: array.shape for name, array in self.export(zeros)}

  def native(
    self,
    arrays: Mapping[str, np.ndarray],
    expected: Mapping[str, tuple[int, ...]],
  ) -> dict[str, np.ndarray]:
    """Returns parameters with native paths and layout, as float32.

    Args:
      arrays: {foreign name: array}, of the shapes that `shapes` returns.
      expected: {native path: shape} of all parameters of the model.
    """

    def leaf(path: str, shape: tuple[int, ...]) -> np.ndarray:
      entry = self.find(path)
      assert entry is not None, path  # or `shapes` would have raised

      def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the native array of one layer, by its foreign name."""
        array = np.split(arrays[name], entry.count)[entry.index]
        with np.errstate(over='ignore'):  # infinity is reported after loading
          array = np.asarray(array, np.float32)
        return self._native(path, array, shape)

      if not _NUMBER.search(entry.name):
        return take(entry.name, shape)
      names = (_numbered(entry.name, i) for i in range(shape[0]))
      return np.stack([take(name, shape[1:]) for name in names])

    return {path: leaf(path, shape) for path, shape in expected.items()}

  def _foreign(self, path: str, array: np.ndarray) -> np.ndarray:
    """Returns an array of one layer in the foreign layout."""
    if not self.torch:
      return array
    if path == _PATCHES:  # [p, p, c, d] to [d, c, p, p]
      return array.transpose(3, 2, 0, 1)
    # Outputs are heads and their channels, or gate and value of a gated MLP.
    if re.search(r'(attention/(query|key|value)|fc1)/kernel$', path):
      return array.reshape(array.shape[0], -1).T  # from [d, h, d/h]
    if re.search(r'(attention/(query|key|value)|fc1)/bias$', path):
      return array.reshape(-1)  # from [h, d/h]
    if path.endswith('attention/out/kernel'):  # from [h, d/h, d]
      return array.reshape(-1, array.shape[-1]).T
    return array.T if path.endswith('/kernel') else array

  def _native(
    self, path: str, array: np.ndarray, shape: tuple[int, ...]
  ) -> np.ndarray:
    """Returns an array in the native layout; the inverse of `_foreign`."""
    if not self.torch:
      return array
    if path == _PATCHES:  # [d, c, p, p] to [p, p, c, d]
      return array.transpose(2, 3, 1, 0)
    if path.endswith('/kernel'):  # [outputs, inputs] to [inputs, outputs]
      array = array.T
    return array.reshape(shape)  # splits heads


def _numbered(name: str, i: int) -> str:
  """Returns the name of array `i` of a stack."""

  def number(match: re.Match[str]) -> str:
    value = int(match['step'] or 1) * i + int(match['first'] or 0)
    return str(value).zfill(int(match['digits'] or 0))

  return _NUMBER.sub(number, name)


def renamed(
  arrays: Mapping[str, T], aliases: Iterable[tuple[str, Any]]
) -> dict[str, T]:
  """Returns arrays, with older names replaced by current ones.

  Args:
    arrays: arrays, or other values, under current or older names.
    aliases: pairs of a regular expression and its replacement (see `re.sub`),
      applied one after the other.
  """
  result = {}
  for name, array in arrays.items():
    for pattern, replacement in aliases:
      name = re.sub(pattern, replacement, name)
    result[name] = array
  return result


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
    shown = ', '.join(f'{name} ({dtype})' for name, dtype in others.items())
    raise UserError(
      f'{path} contains {shown}; only floating-point numbers of at least 16 '
      'bits can be read: use the original, not quantized weights.'
    )


def shape_of(
  path: str, arrays: Mapping[str, np.ndarray], name: str, rank: int, kind: str
) -> tuple[int, ...]:
  """Checks and returns the shape of an array that all models of a kind have.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.
    name: name of the array.
    rank: number of its dimensions.
    kind: description of the models, for messages.

  Raises:
    UserError: the array is missing, has another rank, or is empty.
  """
  actual = arrays[name].shape if name in arrays else None
  if actual is None or len(actual) != rank or 0 in actual:
    shown = 'it is missing' if actual is None else f'it is {list(actual)}'
    raise UserError(
      f'{path} does not contain {kind}: {name} must have {rank} dimensions '
      f'above 0, but {shown}; the file has {", ".join(sorted(arrays)[:3])} …'
    )
  return actual
