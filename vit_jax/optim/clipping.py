"""Limits on the length of gradients."""

import re
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError

PyTree = Any
KINDS = ('global', 'tensor')
_EPSILON = 1e-6  # beside the norm, as torch has it


def transformation(
  limit: float, kind: str, joined: tuple[str, ...]
) -> optax.GradientTransformation:
  """Clips gradients to a norm.

  Args:
    limit: the largest norm, above 0.
    kind: 'global', of all gradients together, or 'tensor', see `by_tensor`.
    joined: see `by_tensor`; for that kind alone.

  Raises:
    UserError: unknown kind, no regular expression, or one that is not used.
  """
  if kind not in KINDS:
    raise UserError(f'optimizer.clip is {kind!r}; allowed: {", ".join(KINDS)}.')
  if kind == 'tensor':
    return by_tensor(limit, joined)
  if joined:
    raise UserError(
      f"optimizer.clip_joined is {joined}, which is for optimizer.clip='tensor'"
      f'; it is {kind!r}.'
    )
  return optax.clip_by_global_norm(limit)


def by_tensor(
  limit: float, joined: tuple[str, ...] = ()
) -> optax.GradientTransformation:
  """Clips each tensor by its own norm: g · min(1, limit / (|g| + 1e-6)).

  Layers that are stacked here are tensors of their own.

  Args:
    limit: the largest norm, above 0.
    joined: patterns of parts of a path. Leaves whose paths differ in nothing
      else are one tensor: with 'query|key|value' those three, which most codes
      keep in one matrix.

  Raises:
    UserError: no regular expression.

  Reference: the code of DINO (arXiv 2104.14294).
  """
  try:
    patterns = [re.compile(pattern) for pattern in joined]
  except re.error as error:
    raise UserError(
      f'optimizer.clip_joined is {joined} ({error}); give regular expressions, '
      "such as 'query|key|value'."
    ) from error

  def name(path: str) -> str:
    for pattern in patterns:
      path = pattern.sub('*', path)
    return path

  def clipped(updates: PyTree, params: PyTree) -> PyTree:
    del params
    squares: dict[str, Array] = {}
    for path, leaf in tree.flatten(updates).items():
      squares[name(path)] = squares.get(name(path), 0) + _squares(path, leaf)

    def scaled(path: str, leaf: Array) -> Array:
      norm = jnp.sqrt(squares[name(path)])
      factor = jnp.minimum(1, limit / (norm + _EPSILON))
      return leaf * factor.reshape(
        *factor.shape, *[1] * (leaf.ndim - norm.ndim)
      )

    return tree.map_with_path(scaled, updates)

  return optax.stateless(clipped)


def _squares(path: str, leaf: Array) -> Float[Array, '...']:
  """Sum of squares of a leaf, of each layer if it is a stack of them."""
  first = int(sharding.STACKED in path)
  return jnp.sum(jnp.square(leaf), axis=tuple(range(first, leaf.ndim)))
