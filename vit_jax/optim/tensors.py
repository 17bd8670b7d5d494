"""Norms of tensors as in other projects: layers unstacked, some leaves joined.

In most other projects, each layer has its own tensors, and query, key and value
share one. These norms make clipping and trust ratios the same as there.
"""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError

PyTree = Any


def naming(key: str, joined: tuple[str, ...]) -> Callable[[str], str]:
  """Returns a function from a leaf's path to the name of its tensor.

  Args:
    key: key of the config, for messages.
    joined: regular expressions for parts of a path. Leaves whose paths differ
      only in such parts count as one tensor. 'query|key|value' joins the three
      leaves that most projects keep in one matrix.

  Raises:
    UserError: a pattern is not a regular expression.
  """
  try:
    patterns = [re.compile(pattern) for pattern in joined]
  except re.error as error:
    raise UserError(
      f'{key} is {joined} ({error}); give regular expressions, such as '
      "'query|key|value'."
    ) from error

  def name(path: str) -> str:
    for pattern in patterns:
      path = pattern.sub('*', path)
    return path

  return name


def norms(
  values: PyTree, name: Callable[[str], str]
) -> dict[str, Float[Array, '...']]:
  """Returns the norm of the tensor that contains each leaf, by path.

  Args:
    values: arrays.
    name: result of `naming`.

  Returns:
    Arrays that can be broadcast to the leaves: `[layers, 1, …]` for a stack of
    layers, which has a norm for each layer, and a scalar for other leaves.
  """
  flat = tree.flatten(values)
  squares: dict[str, Array] = {}
  for path, leaf in flat.items():
    first = int(sharding.STACKED in path)
    own = jnp.sum(jnp.square(leaf), axis=tuple(range(first, leaf.ndim)))
    squares[name(path)] = squares.get(name(path), 0) + own
  return {
    path: jnp.sqrt(squares[name(path)]).reshape(
      *squares[name(path)].shape,
      *[1] * (leaf.ndim - squares[name(path)].ndim),
    )
    for path, leaf in flat.items()
  }
