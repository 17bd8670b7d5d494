"""Pytrees of arrays by path: 'encoder/layers/mlp/fc1/kernel'."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def path_name(path: tuple[Any, ...]) -> str:
  """Joins a jax key path with '/', whatever kinds of keys it has."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def map_with_path(function: Callable[..., Any], tree: PyTree) -> PyTree:
  """Maps `function(path_name, leaf)` over the leaves."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: function(path_name(path), leaf), tree
  )


def flatten(tree: PyTree) -> dict[str, Any]:
  """Returns {path: leaf}, in the tree's own order."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {path_name(path): leaf for path, leaf in leaves}


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
  """Turns {'a/b': leaf} into nested dicts."""
  tree: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, last = path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def apart(tree: PyTree, ends: tuple[str, ...]) -> PyTree:
  """Leaves whose path has one of these ends, as tuples along their first axis.

  Each part keeps the axis, of length 1. `together` undoes it.
  """

  def parts(path: str, leaf: Any) -> Any:
    if not path.endswith(ends):
      return leaf
    return tuple(leaf[i : i + 1] for i in range(leaf.shape[0]))

  return map_with_path(parts, tree) if ends else tree


def together(tree: PyTree) -> PyTree:
  """Joins what `apart` has taken apart; nothing else may be a plain tuple."""

  def is_apart(node: Any) -> bool:
    return type(node) is tuple

  return jax.tree.map(
    lambda node: jnp.concatenate(node) if is_apart(node) else node,
    tree,
    is_leaf=is_apart,
  )


def size(tree: PyTree) -> int:
  """Number of scalars in all leaves together."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
