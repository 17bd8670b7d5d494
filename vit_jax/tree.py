"""Pytrees of arrays by path: 'encoder/layers/mlp/fc1/kernel'."""

import math
from collections.abc import Callable
from typing import Any

import jax

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


def size(tree: PyTree) -> int:
  """Number of scalars in all leaves together."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
