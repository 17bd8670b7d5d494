"""Pytrees whose leaves have paths such as 'encoder/layers/mlp/fc1/kernel'.

Tables as aligned text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def path_name(path: tuple[Any, ...]) -> str:
  """Joins the keys of a JAX key path, of any kind, with '/'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def map_with_path(function: Callable[..., Any], tree: PyTree) -> PyTree:
  """Maps `function(path_name, leaf)` over the leaves."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: function(path_name(path), leaf), tree
  )


def flatten(tree: PyTree) -> dict[str, Any]:
  """Returns {path: leaf}, in the order of `jax.tree.leaves`."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {path_name(path): leaf for path, leaf in leaves}


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


def apart(tree: PyTree, ends: tuple[str, ...]) -> PyTree:
  """Splits leaves into tuples along their first axis; `together` joins them.

  Args:
    tree: arrays.
    ends: path suffixes of the leaves to split.

  Returns:
    Tree with a tuple of `[1, …]` arrays in place of each of these leaves.
  """

  def parts(path: str, leaf: Any) -> Any:
    if not path.endswith(ends):
      return leaf
    return tuple(leaf[i : i + 1] for i in range(leaf.shape[0]))

  return map_with_path(parts, tree) if ends else tree


def together(tree: PyTree) -> PyTree:
  """Concatenates the tuples of `apart` along their first axis.

  Args:
    tree: result of `apart`; it must not contain other plain tuples.
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


def align(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
  """Pads cells so that columns line up, two spaces apart.

  Args:
    rows: rows of cells; all rows have the same length.
    right: indices of the columns that are aligned to the right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

  def cell(text: str, column: int) -> str:
    width = widths[column]
    return text.rjust(width) if column in right else text.ljust(width)

  lines = ['  '.join(cell(t, i) for i, t in enumerate(row)) for row in rows]
  return '\n'.join(line.rstrip() for line in lines)
