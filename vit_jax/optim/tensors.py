"""Tensors as other projects keep them: layers apart, some leaves joined."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError

PyTree = Any


def naming(key: str, joined: tuple[str, ...]) -> Callable[[str], str]:
  """(path) → the name of the tensor that a leaf is of.

  Args:
    key: key of the config, for messages.
    joined: patterns of parts of a path. Leaves whose paths differ in nothing
      else are one tensor: with 'query|key|value' those three, which most codes
      keep in one matrix.

  Raises:
    UserError: no regular expression.
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
  """{path: norm of the tensor that the leaf is of}, ready to multiply it.

  A leaf that is a stack of layers has a norm for each of them.
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
