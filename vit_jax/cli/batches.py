"""Chooses the number of images per batch by the memory of the devices."""

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from vit_jax.arrays import memory, sharding
from vit_jax.processes import consensus
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
# Batches with fewer pixels fit everywhere, and are not compiled for a check.
_SMALL = 128 * 256 * 256
_USABLE = 0.6  # fraction of the memory that the program may use
_MOST = 128  # images per batch, by default


def define_flag() -> None:
  """Defines --batch_size, whose default is the result of `fitting`."""
  flags.DEFINE_integer(
    'batch_size',
    None,
    f'Images per batch on all devices; default: {_MOST}, or fewer if memory is '
    'scarce.',
  )


def fitting(
  weights: Pretrained,
  mesh: Mesh,
  most: int = _MOST,
  predict: Callable[[Any, Any], Any] | None = None,
  examples: int | None = None,
) -> int:
  """Returns a number of images whose predictions fit into memory.

  The predictions are compiled for `most` images, and for half as many until the
  program needs at most 60 % of the memory of a device. All processes must call
  it, and the result is that of process 0.

  Small images fit in any case, and the result is `most`.

  Args:
    weights: weights that are applied, with their image size.
    mesh: mesh of the devices.
    most: number of images that is returned if they fit.
    predict: function of (parameters, batch) to run; by default
      `Objective.predict`.
    examples: number of images that there are, if known.

  Returns:
    A multiple of the number of devices, unless it is `most`.
  """
  height, width = weights.image_size
  limit = memory.of_device(mesh.local_devices[0])
  if limit is None or most * height * width <= _SMALL * mesh.size:
    return most
  params = weights.abstract_params(mesh)
  program = jax.jit(predict or weights.objective().predict)
  # A batch would be filled up with images that are computed for nothing.
  needed = most if examples is None else min(most, examples)
  size = -(-needed // mesh.size) * mesh.size
  largest = min(size, most)
  while size > mesh.size:
    shape = (size, height, width, weights.model().channels)
    image = jax.ShapeDtypeStruct(
      shape, np.uint8, sharding=sharding.batch_sharding(mesh)
    )
    if _bytes(program, params, image, mesh) <= _USABLE * limit:
      break
    size = max(size // 2 // mesh.size, 1) * mesh.size
  size = consensus.from_main(lambda: min(size, most))
  if size < largest:
    log.info(
      'batches of %d instead of %d images of %dx%d pixels, because of the '
      'memory of %s',
      size,
      largest,
      height,
      width,
      memory.text(limit),
    )
  return size


def _bytes(
  predict: Any, params: Any, image: jax.ShapeDtypeStruct, mesh: Mesh
) -> float:
  """Returns the memory per device of a program; infinite if it is too large.

  Args:
    predict: jitted function of (parameters, batch).
    params: shapes of the parameters.
    image: shape of the images of a batch.
    mesh: mesh of the devices.
  """
  try:
    with jax.set_mesh(mesh):
      compiled = predict.lower(params, {'image': image}).compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return math.inf
  used = memory.program_bytes(compiled)
  return 0 if used is None else used['peak']
