"""Muon's directions: momentum with all its singular values made alike."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from vit_jax.arrays import sharding, tree

PyTree = Any
_RMS = 0.2  # of a direction of Adam, which these are made as large as


def directions(
  momentum: float, others: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Muon's for the matrices of the layers, another's for all other leaves.

  The gradient's momentum (Nesterov's) is made orthogonal by five steps of
  Newton and Schulz, and multiplied by .2 √max(rows, columns), so that its
  root mean square is that of Adam's directions and one learning rate suits
  both. The embedding, the head, norms and biases are left to the other.

  Args:
    momentum: in [0, 1).
    others: transformation of the other leaves.

  References: Jordan et al., "Muon" (2024); Liu et al., arXiv 2502.16982,
  section 2.2, for the factor.
  """
  matrices = optax.chain(
    contrib.scale_by_muon(
      beta=momentum, weight_dimension_numbers=dimension_numbers
    ),
    optax.stateless(_as_large_as_adams),
  )
  return optax.partition({True: matrices, False: others}, _are_matrices)


def dimension_numbers(params: PyTree) -> PyTree:
  """Returns which axes of each matrix are its rows and which its columns.

  A kernel may have several axes for heads. They are divided where the matrix is
  most nearly square: `[d, heads, d/heads]` after the first axis and `[heads,
  d/heads, d]` before the last. Layers in a stack are separate matrices.
  """

  def numbers(path: str, leaf: Any) -> contrib.MuonDimensionNumbers | None:
    if not _is_matrix(path, leaf):
      return None
    rows, columns = _divided(path, leaf)
    return contrib.MuonDimensionNumbers(rows, columns)

  return tree.map_with_path(numbers, params)


def _is_matrix(path: str, leaf: Any) -> bool:
  stacked = sharding.STACKED in path
  return (
    stacked and path.rpartition('/')[2] == 'kernel' and len(leaf.shape) >= 3
  )


def _are_matrices(params: PyTree) -> PyTree:
  return tree.map_with_path(_is_matrix, params)


def _divided(path: str, leaf: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the axes of rows and the axes of columns."""
  first, last = int(sharding.STACKED in path), len(leaf.shape)

  def size(axes: range) -> int:
    return math.prod(leaf.shape[axis] for axis in axes)

  def far_from_square(place: int) -> float:
    rows, columns = size(range(first, place)), size(range(place, last))
    return abs(math.log(rows / columns))

  place = min(range(first + 1, last), key=far_from_square)
  return tuple(range(first, place)), tuple(range(place, last))


def _as_large_as_adams(updates: PyTree, params: PyTree) -> PyTree:
  del params

  def scaled(path: str, leaf: jax.Array) -> jax.Array:
    sides = [
      math.prod(leaf.shape[axis] for axis in axes)
      for axes in _divided(path, leaf)
    ]
    return leaf * jnp.asarray(_RMS * math.sqrt(max(sides)), leaf.dtype)

  return tree.map_with_path(scaled, updates)
