"""Limits on the length of gradients."""

from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.arrays import tree
from vit_jax.errors import UserError, check_choice
from vit_jax.optim import tensors

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
  check_choice('optimizer.clip', kind, KINDS)
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
    joined: see `tensors.naming`.

  Raises:
    UserError: no regular expression.

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
