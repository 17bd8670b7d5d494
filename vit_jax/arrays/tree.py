"""Pytrees whose leaves have paths such as 'encoder/layers/mlp/fc1/kernel'."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError

PyTree = Any
# Number of a layer within a name, such as '.11.' or '/encoderblock_11/'.
_LAYER = re.compile(r'(?<=[._/])\d+(?=[./])')


def path_name(path: tuple[Any, ...]) -> str:
  """Joins the keys of a JAX key path, of any kind, with '/'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def map_with_path(
  function: Callable[..., Any], tree: PyTree, *others: PyTree
) -> PyTree:
  """Maps `function(path_name, leaf, …)` over the leaves of similar trees."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: function(path_name(path), *leaves), tree, *others
  )


def flatten(tree: PyTree) -> dict[str, Any]:
  """Returns {path: leaf}, in the order of `jax.tree.leaves`."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {path_name(path): leaf for path, leaf in leaves}


def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
  """Returns {path: shape} of the leaves; the tree may be flat already."""
  return {path: tuple(leaf.shape) for path, leaf in flatten(tree).items()}


def check_shapes(
  path: str,
  actual: Mapping[str, tuple],
  expected: Mapping[str, tuple],
  advice: str = 'Set config.model.*, config.num_classes and JAX_ENABLE_X64 to '
  'the values that the file was written with.',
  most: int | None = 5,
) -> None:
  """Checks that a file contains the arrays of a model, with their shapes.

  Args:
    path: path of the file, for messages.
    actual: shapes in the file, {name: shape}, or any other tuples.
    expected: shapes in the model, {name: shape}.
    advice: last sentence of the message.
    most: number of differences that the message lists; None for all.

  Raises:
    UserError: arrays are missing, unknown or have another shape.
  """
  rows: dict[tuple[str, str, str], list[str]] = {}
  for name in sorted({*actual, *expected}):
    if actual.get(name) != expected.get(name):
      in_file = str(list(actual[name])) if name in actual else 'missing'
      in_model = str(list(expected[name])) if name in expected else 'none'
      # Arrays that differ only in the layer's number share a line.
      kind = _LAYER.sub('*', name, count=1)
      rows.setdefault((kind, in_file, in_model), []).append(name)
  if not rows:
    return
  lines = [
    f'  {names[0]}'
    + (f' and {len(names) - 1} other layers' if names[1:] else '')
    + f': {in_file} in the file, {in_model} in the model'
    for (_, in_file, in_model), names in rows.items()
  ]
  shown = lines[:most]
  if len(shown) < len(lines):
    shown.append(f'  and {len(lines) - len(shown)} more')
  raise UserError(
    '\n'.join(
      [f'{path} does not contain the parameters of the model:', *shown, advice]
    )
  )


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
  """Converts {'a/b': leaf} to nested dicts."""
  tree: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, last = path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def unstack_layers(tree: PyTree, suffixes: tuple[str, ...]) -> PyTree:
  """Splits stacked leaves into one array per layer; see `stack_layers`.

  Args:
    tree: arrays.
    suffixes: path suffixes of the leaves to split, `[layers, …]`.

  Returns:
    Tree with a tuple of `[1, …]` arrays in place of each of these leaves.
  """

  def split(path: str, leaf: Any) -> Any:
    if not path.endswith(suffixes):
      return leaf
    return tuple(leaf[i : i + 1] for i in range(leaf.shape[0]))

  return map_with_path(split, tree) if suffixes else tree


def stack_layers(tree: PyTree) -> PyTree:
  """Concatenates the tuples of `unstack_layers` along their first axis.

  Args:
    tree: result of `unstack_layers`; it must not contain other plain tuples.
  """

  def is_tuple(node: Any) -> bool:
    return type(node) is tuple

  return jax.tree.map(
    lambda node: jnp.concatenate(node) if is_tuple(node) else node,
    tree,
    is_leaf=is_tuple,
  )


def size(tree: PyTree) -> int:
  """Returns the total number of scalars in all leaves."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
