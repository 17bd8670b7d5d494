"""Largest batch size whose predictions fit into the memory of a device."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import memory, sharding
from vit_jax.processes import consensus
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
# Batches with fewer pixels fit everywhere, and are not compiled for a check.
_SMALL = 128 * 256 * 256
_USABLE = 0.6  # fraction of the memory that the program may use
_LIMIT = 128  # images per batch, by default


def largest_batch_size(
  weights: Pretrained,
  mesh: Mesh,
  limit: int = _LIMIT,
  predict: Callable[[Any, Any], Any] | None = None,
  examples: int | None = None,
) -> int:
  """Returns a number of images whose predictions fit into memory.

  The predictions are compiled for `limit` images, or all if there are fewer,
  and for half as many until the program needs at most 60 % of the memory of a
  device. One image per device is not tried. All processes must call it, and
  the result is that of process 0.

  Small images fit in any case, and the result is `limit`.

  Args:
    weights: weights that are applied, with their image size.
    mesh: mesh of the devices.
    limit: number of images that is returned if they fit.
    predict: function of (parameters, batch) to run; by default
      `Objective.predict`.
    examples: number of images that there are, if known.

  Returns:
    A multiple of the number of devices, unless it is `limit`.
  """
  height, width = weights.image_size
  available = memory.of_device(mesh.local_devices[0])
  if available is None or limit * height * width <= _SMALL * mesh.size:
    return limit
  params = weights.abstract_weights(mesh)
  program = jax.jit(predict or weights.objective().predict)

  def fits(size: int) -> bool:
    shape = (size, height, width, weights.model().channels)
    image = jax.ShapeDtypeStruct(
      shape, np.uint8, sharding=sharding.batch_sharding(mesh)
    )
    try:
      with jax.set_mesh(mesh):
        compiled = program.lower(params, {'image': image}).compile()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      return False
    used = memory.program_bytes(compiled)
    return used is None or used['peak'] <= _USABLE * available

  # A batch would be filled up with images that are computed for nothing.
  needed = limit if examples is None else min(limit, examples)
  size = -(-needed // mesh.size) * mesh.size
  largest = min(size, limit)
  while size > mesh.size and not fits(size):
    size = max(size // 2 // mesh.size, 1) * mesh.size
  size = consensus.from_main(lambda: min(size, limit))
  if size < largest:
    images = f'{largest} images of {height}x{width} pixels'
    text = 'batches of %d instead of %s, because of the memory of %s'
    log.info(text, size, images, memory.text(available))
  return size
