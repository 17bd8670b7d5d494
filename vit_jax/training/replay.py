"""Silent data corruption: a step computed twice must give the same bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.arrays import checksum, sharding

PyTree = Any


def twice(
  update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
  state: PyTree,
  batch: PyTree,
  mesh: jax.sharding.Mesh,
) -> tuple[PyTree, PyTree, list[str]]:
  """Does an update on a copy of the state first, then on the state.

  Args:
    update: (state, batch) → (new state, metrics); the state is donated.
    state: of the training.
    batch: of this step.
    mesh: of the state.

  Returns:
    New state, metrics, and the paths of the leaves whose bits differ.
  """
  everywhere = sharding.replicated(mesh)
  copy = jax.tree.map(jnp.copy, state)
  first = checksum.checksums(update(copy, batch)[0], everywhere)
  state, metrics = update(state, batch)
  second = checksum.checksums(state, everywhere)
  return state, metrics, [path for path in first if first[path] != second[path]]
