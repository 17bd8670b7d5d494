"""Splits a state into the items of a step directory, and reads the items."""

import contextlib
import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.arrays import tree
from vit_jax.errors import UserError

PyTree = Any
# Format of the step directories that are written; it changes whenever old
# readers would fail.
FORMAT = 3
READABLE = (2, 3)  # formats that can be read
NAMES = ('params', 'average', 'extra', 'training', 'about', 'manifest')
# Items that an evaluation reads without reading the others.
_SEPARATE = ('params', 'average', 'extra')


class CorruptError(Exception):
  """The content of a step directory differs from what was written."""


def split(state: PyTree) -> dict[str, dict[str, Any]]:
  """Splits a state into items, each a nested dict of leaves by path."""
  nested = tree.unflatten(tree.flatten(state))
  items = {name: nested.pop(name) for name in _SEPARATE if name in nested}
  return items | {'training': nested}


def join(items: dict[str, Any], target: PyTree) -> PyTree:
  """Inverts `split`.

  Args:
    items: for each item, by name, its leaves as a nested dict.
    target: tree with the structure of the result.
  """
  flat: dict[str, Any] = {}
  for name, item in items.items():
    prefix = '' if name == 'training' else f'{name}/'
    flat |= {prefix + path: leaf for path, leaf in tree.flatten(item).items()}
  leaves = [flat[path] for path in tree.flatten(target)]
  return jax.tree.unflatten(jax.tree.structure(target), leaves)


def read_json(path: epath.Path, filename: str = 'metadata') -> dict[str, Any]:
  """Reads a JSON item, without waiting for other processes.

  Args:
    path: directory of the item.
    filename: name of the JSON file in the directory.

  Raises:
    CorruptError: the item is missing, or is not a JSON object.
    OSError: the file cannot be read.
  """
  try:
    content = json.loads((path / filename).read_text())
  except (FileNotFoundError, NotADirectoryError) as error:
    raise CorruptError(f'the item {path.name} is missing') from error
  except ValueError as error:
    raise CorruptError(
      f'the item {path.name} is unreadable: {error}'
    ) from error
  if not isinstance(content, dict):
    raise CorruptError(f'the item {path.name} is not a JSON object')
  return content


def read_arrays(path: epath.Path, abstract: PyTree) -> PyTree:
  """Reads an item of arrays, without waiting for other processes.

  Each process reads the shards of its devices.

  Args:
    path: directory of the item.
    abstract: shapes, dtypes and shardings of the arrays.

  Raises:
    Exception: the item is damaged; the type depends on the damage.
  """
  with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
    return handler.restore(path, args=ocp.args.StandardRestore(abstract))


def innermost(error: BaseException) -> BaseException:
  """Returns the innermost cause of an exception."""
  while error.__cause__ is not None:
    error = error.__cause__
  return error


def root_cause(error: BaseException) -> str:
  """Returns the innermost cause of an exception, in one line."""
  error = innermost(error)
  text = str(error).strip().splitlines()
  return f'{type(error).__name__}: {text[0][:300] if text else ""}'


def check_shapes(
  path: str, actual: dict[str, tuple], expected: dict[str, tuple]
) -> None:
  """Compares the shapes in a file with those of a model.

  Args:
    path: path of the file, for messages.
    actual: shapes in the file, by the path of the leaf.
    expected: shapes of the model's leaves, by path.

  Raises:
    UserError: the shapes differ. The message names up to five missing, unknown
      or different leaves.
  """
  differing = [
    f'{key}: file {actual.get(key, "none")}, model {expected.get(key, "none")}'
    for key in sorted({*actual, *expected})
    if actual.get(key) != expected.get(key)
  ]
  if differing:
    more = f' and {len(differing) - 5} more' if len(differing) > 5 else ''
    raise UserError(
      f'{path} contains other parameters than the model: '
      f'{"; ".join(differing[:5])}{more}. Set the model keys '
      '(config.model.*, config.num_classes) to the values that the file was '
      'written with.'
    )


def shapes(state: PyTree) -> dict[str, tuple]:
  """Returns the shapes of a state's leaves, by path."""
  return {key: tuple(leaf.shape) for key, leaf in tree.flatten(state).items()}
