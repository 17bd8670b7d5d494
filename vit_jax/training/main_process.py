"""Gathers all weights on the main process, for work that only it does."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.arrays import sharding
from vit_jax.arrays.tree import PyTree
from vit_jax.evaluators.contract import Setting


def gather_to_main(setting: Setting, weights: PyTree) -> tuple[Setting, PyTree]:
  """Returns a setting and weights that the main process can use by itself.

  All processes must call it, because each may have only a part of the weights.
  With several processes, the main one gets all weights on each of its own
  devices; the values returned on the others must not be used. The main process
  can then compute without communicating: if it fails, the others are only
  waiting for its result (`processes.consensus.from_main`).

  Args:
    setting: setting of the run's evaluators.
    weights: weights, in any sharding.

  Returns:
    A setting whose mesh holds only local devices, and the weights replicated
    on that mesh. With one process, both arguments unchanged.
  """
  if jax.process_count() == 1:
    return setting, weights
  mesh = sharding.make_mesh(jax.local_devices())
  replicated = sharding.replicated(mesh)

  def gather(leaf: jax.Array) -> jax.Array:
    if leaf.is_fully_replicated:
      array = np.asarray(leaf.addressable_data(0))
    else:
      array = multihost_utils.process_allgather(leaf, tiled=True)
    is_main = jax.process_index() == 0
    return jax.device_put(array, replicated) if is_main else leaf

  # A batch must be divisible by the number of local devices.
  batch_size = -(-setting.batch_size // mesh.size) * mesh.size
  local = setting._replace(
    mesh=mesh,
    batch_size=batch_size,
    # The check for signals is a collective, which one process cannot call.
    check=lambda: None,
  )
  return local, jax.tree.map(gather, weights)
