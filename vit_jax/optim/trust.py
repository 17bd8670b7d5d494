"""Trust ratios of LAMB and LARS."""

from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.arrays import tree
from vit_jax.optim import tensors
from vit_jax.optim.common import Decays

PyTree = Any


def ratios(
  joined: tuple[str, ...], decays: Decays, coefficient: float = 1.0
) -> optax.GradientTransformation:
  """Returns a transformation that multiplies directions by trust ratios.

  The trust ratio of a tensor is c · |parameter| / |direction|, or 1 if either
  norm is 0.

  Args:
    joined: regular expressions that join leaves into one tensor, see
      `tensors.naming`.
    decays: function from parameters to a tree of booleans. Leaves with True are
      multiplied by their ratio; the others are not changed.
    coefficient: c; 1 for LAMB, .001 for LARS.

  Raises:
    UserError: a pattern is not a regular expression.

  References: You et al., arXiv 1904.00962, algorithm 2 (LAMB), and arXiv
  1708.03888, equation 6 (LARS).
  """
  name = tensors.naming('optimizer.trust_joined', joined)

  def adapted(updates: PyTree, params: PyTree) -> PyTree:
    weights, steps = tensors.norms(params, name), tensors.norms(updates, name)
    chosen = tree.flatten(decays(params))

    def scaled(path: str, leaf: Array) -> Array:
      if not chosen[path]:
        return leaf
      return leaf * _ratio(coefficient * weights[path], steps[path])

    return tree.map_with_path(scaled, updates)

  return optax.stateless(adapted)


def _ratio(
  weight: Float[Array, '...'], step: Float[Array, '...']
) -> Float[Array, '...']:
  """Returns weight / step, or 1 where either is 0."""
  defined = (weight > 0) & (step > 0)
  return jnp.where(defined, weight / jnp.where(defined, step, 1), 1.0)
