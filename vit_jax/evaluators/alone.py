"""Work of the main process alone, whatever the number of processes."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.arrays import sharding
from vit_jax.arrays.tree import PyTree
from vit_jax.evaluators.contract import Setting


def on_main(setting: Setting, weights: PyTree) -> tuple[Setting, PyTree]:
  """Setting and weights with which one process can judge by itself.

  All processes call it, as parts of the weights may be theirs. Of several, the
  main one then has all weights on each of its own devices; those of the others
  are not to be used. What it does with them meets no other process: it may
  fail, or take another way, and nobody waits but for its end
  (`run.agreement.from_main`).
  """
  if jax.process_count() == 1:
    return setting, weights
  mesh = sharding.make_mesh(jax.local_devices())
  whole = sharding.replicated(mesh)

  def own(leaf: jax.Array) -> jax.Array:
    if leaf.is_fully_replicated:
      array = np.asarray(leaf.addressable_data(0))
    else:
      array = multihost_utils.process_allgather(leaf, tiled=True)
    return jax.device_put(array, whole) if jax.process_index() == 0 else leaf

  batch_size = -(-setting.batch_size // mesh.size) * mesh.size
  alone = setting._replace(
    mesh=mesh,
    batch_size=batch_size,
    check=lambda: None,  # signals are agreed on by calls of all
  )
  return alone, jax.tree.map(own, weights)
