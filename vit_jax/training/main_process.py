"""Helpers for work that only the main process does, with all weights."""

import contextlib
import logging
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.arrays import sharding
from vit_jax.arrays.tree import PyTree
from vit_jax.evaluators.contract import Setting
from vit_jax.processes.preemption import StopRequested

log = logging.getLogger('vit_jax')


@contextlib.contextmanager
def failures_logged(consequence: str) -> Iterator[None]:
  """Logs an error in a `with` block or a decorated function, and continues.

  Args:
    consequence: description of what is missing after an error, for the log.
  """
  try:
    yield
  except StopRequested:
    log.info('%s: a signal arrived', consequence)
  except Exception as error:  # noqa: BLE001 (pictures must not end a run)
    log.warning('%s: %s: %s', consequence, type(error).__name__, error)


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
