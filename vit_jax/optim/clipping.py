"""Clipping of gradients by their norm."""

from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.arrays import tree
from vit_jax.errors import UserError, check_choice
from vit_jax.optim import tensors

PyTree = Any
KINDS = ('global', 'tensor')
_EPSILON = 1e-6  # added to the norm, as in PyTorch


def transformation(
  limit: float, kind: str, joined: tuple[str, ...]
) -> optax.GradientTransformation:
  """Returns a transformation that clips gradients by their norm.

  Args:
    limit: largest norm, above 0.
    kind: 'global' to limit the norm of all gradients together, or 'tensor' to
      limit the norm of each tensor, see `by_tensor`.
    joined: regular expressions that join leaves into one tensor, see
      `tensors.naming`; for the kind 'tensor' only.

  Raises:
    UserError: the kind is unknown, a pattern is not a regular expression, or
      there are patterns and the kind is 'global'.
  """
  check_choice('optimizer.clip', kind, KINDS)
  if kind == 'tensor':
    return by_tensor(limit, joined)
  if joined:
    raise UserError(
      f'optimizer.clip_joined is {joined}, and optimizer.clip is {kind!r}. '
      "Set optimizer.clip='tensor', or leave clip_joined empty."
    )
  return optax.clip_by_global_norm(limit)


def by_tensor(
  limit: float, joined: tuple[str, ...] = ()
) -> optax.GradientTransformation:
  """Returns a transformation that clips each tensor by its own norm.

  The gradient g of a tensor becomes g · min(1, limit / (|g| + 1e-6)). Each
  layer of a stack is a separate tensor.

  Args:
    limit: largest norm, above 0.
    joined: regular expressions that join leaves into one tensor, see
      `tensors.naming`.

  Raises:
    UserError: a pattern is not a regular expression.

  Reference: the code of DINO (arXiv 2104.14294).
  """
  name = tensors.naming('optimizer.clip_joined', joined)

  def clipped(updates: PyTree, params: PyTree) -> PyTree:
    del params
    norms = tensors.norms(updates, name)
    return tree.map_with_path(
      lambda path, leaf: (
        leaf * jnp.minimum(1, limit / (norms[path] + _EPSILON))
      ),
      updates,
    )

  return optax.stateless(clipped)
