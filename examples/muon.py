"""Muon, an optimizer for the matrices of the layers.

`optimizer.name='examples.muon'` selects it; see docs/faq.md.

References: Jordan et al., "Muon" (2024); Liu et al., arXiv 2502.16982.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from vit_jax.arrays import sharding, tree
from vit_jax.config import schema
from vit_jax.errors import check_range
from vit_jax.optim.optimizers import (
  Common,
  Optimizer,
  Setting,
  adam_directions,
)

PyTree = Any
_RMS = 0.2  # typical root mean square of a direction of Adam


@schema.keyed_by(Common)
def muon(
  schedule: optax.Schedule,
  setting: Setting = Setting(),  # noqa: B008 (immutable)
  /,
  *,
  momentum: float = 0.95,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  decay_mask: str = 'kernels',
  **common: Any,
) -> Optimizer:
  """Builds Muon for the matrices of the layers, and Adam for all other leaves.

  See `directions`.

  Args:
    schedule: learning rate as a function of the update count; learning rates
      for Adam are suitable.
    setting: properties of the run.
    momentum: decay of the trace of gradients of the matrices, in [0, 1).
    b1: decay of Adam's first moment, in [0, 1).
    b2: decay of Adam's second moment, in [0, 1).
    eps: value added to the root of the second moment, above 0.
    decay_mask: see `Common`.
    **common: the other fields of `Common`.

  Raises:
    UserError: a value is outside its range, or the mask is unknown.
  """
  check_range('optimizer.momentum', momentum, at_least=0, below=1)
  scale = directions(momentum, adam_directions(b1, b2, eps))
  return Common(decay_mask=decay_mask, **common).chain(scale, schedule, setting)


def directions(
  momentum: float, others: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Returns Muon for the matrices of the layers, `others` for other leaves.

  The Nesterov momentum of the gradient is made orthogonal by five Newton-Schulz
  iterations and multiplied by 0.2 √max(rows, columns). The result has the same
  root mean square as Adam's directions, so both can use the same learning rate.
  The embedding, the head, norms and biases are transformed by `others`.

  Args:
    momentum: decay rate of the momentum, in [0, 1).
    others: transformation of the other leaves, such as Adam's.

  References: Jordan et al., "Muon" (2024); Liu et al., arXiv 2502.16982,
  section 2.2, for the factor.
  """
  matrices = optax.chain(
    contrib.scale_by_muon(
      beta=momentum, weight_dimension_numbers=dimension_numbers
    ),
    optax.stateless(_scale_like_adam),
  )
  are_matrices = functools.partial(tree.map_with_path, _is_matrix)
  return optax.partition({True: matrices, False: others}, are_matrices)


def dimension_numbers(params: PyTree) -> PyTree:
  """Returns the axes of the rows and of the columns of each matrix.

  A kernel with an axis for heads has three axes per layer. They are divided
  into axes of rows and axes of columns such that the matrix is as square as
  possible: `[d, heads, d/heads]` after the first axis, and `[heads, d/heads,
  d]` before the last. Layers of a stack are separate matrices.

  Args:
    params: arrays or their shapes.

  Returns:
    Tree of `contrib.MuonDimensionNumbers`; None for leaves that are not
    matrices of the layers.
  """

  def numbers(path: str, leaf: Any) -> contrib.MuonDimensionNumbers | None:
    if not _is_matrix(path, leaf):
      return None
    return contrib.MuonDimensionNumbers(*_rows_and_columns(path, leaf))

  return tree.map_with_path(numbers, params)


def _is_matrix(path: str, leaf: Any) -> bool:
  stacked = sharding.STACKED in path
  return (
    stacked and path.rpartition('/')[2] == 'kernel' and len(leaf.shape) >= 3
  )


def _rows_and_columns(
  path: str, leaf: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the axes of the rows and the axes of the columns of a matrix."""
  first, last = int(sharding.STACKED in path), len(leaf.shape)

  def size(axes: range) -> int:
    return math.prod(leaf.shape[axis] for axis in axes)

  def distance_from_square(split: int) -> float:
    rows, columns = size(range(first, split)), size(range(split, last))
    return abs(math.log(rows / columns))

  split = min(range(first + 1, last), key=distance_from_square)
  return tuple(range(first, split)), tuple(range(split, last))


def _scale_like_adam(updates: PyTree, params: PyTree) -> PyTree:
  """Scales orthogonal matrices to the root mean square of Adam's directions."""
  del params

  def scaled(path: str, leaf: jax.Array) -> jax.Array:
    sides = [
      math.prod(leaf.shape[axis] for axis in axes)
      for axes in _rows_and_columns(path, leaf)
    ]
    return leaf * jnp.asarray(_RMS * math.sqrt(max(sides)), leaf.dtype)

  return tree.map_with_path(scaled, updates)
