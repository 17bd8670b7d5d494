"""Splits a state into the items of a step directory, and reads the items."""

import contextlib
import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.arrays import tree
from vit_jax.checkpoint.agreement import CorruptError
from vit_jax.files import paths

PyTree = Any
# Format of the step directories that are written; it changes whenever old
# readers would fail.
FORMAT = 3
NAMES = ('params', 'average', 'extra', 'training', 'about', 'manifest')
# Entries of a state that are items of their own, because evaluations read only
# some of them.
_SEPARATE = ('params', 'average', 'extra')


def split(state: PyTree) -> dict[str, dict[str, Any]]:
  """Splits a state into items by name, each a nested dict of leaves by path.

  Entries of the state without an item of their own are in 'training'.
  """
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
    if not isinstance(content, dict):
      raise ValueError('it is not a JSON object')
  except (FileNotFoundError, NotADirectoryError, ValueError) as error:
    problem = f'missing or damaged ({paths.reason(error)})'
    raise CorruptError(f'the item {path.name} is {problem}') from error
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
