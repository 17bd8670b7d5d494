"""Another head on trained weights."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax import checkpoint
from vit_jax.arrays import sharding, tree
from vit_jax.models.contract import Model, Size, abstract_params

log = logging.getLogger('vit_jax')
PyTree = Any


def replace_head(
  params: PyTree, model: Model, image_size: Size, mesh: Mesh
) -> PyTree:
  """Parameters with a fresh head; says which are fresh.

  Args:
    params: of a model with another head, for images of that size.
    model: wanted.
    image_size: pixels.
    mesh: of the devices.

  Raises:
    UserError: they differ in more than what the model calls `fresh`.
  """
  wanted = tree.flatten(abstract_params(model, image_size))
  flat = tree.flatten(params)
  fresh = [
    path
    for path, leaf in wanted.items()
    if path.startswith(model.fresh)
    and (path not in flat or flat[path].shape != leaf.shape)
  ]
  kept = {
    path: leaf
    for path, leaf in flat.items()
    if path not in fresh
    and (path in wanted or not path.startswith(model.fresh))
  }
  checkpoint.check_shapes(
    'the weights',
    {path: leaf.shape for path, leaf in kept.items()},
    {path: leaf.shape for path, leaf in wanted.items() if path not in fresh},
  )

  def init(key: jax.Array) -> dict[str, jax.Array]:
    images = jnp.zeros((1, *image_size, 3))
    made = tree.flatten(model.init(key, images)['params'])
    return {path: made[path] for path in fresh}

  shapes = {path: wanted[path] for path in fresh}
  placed = sharding.with_shardings(shapes, mesh, model.sharding_rules)
  places = {path: leaf.sharding for path, leaf in placed.items()}
  made = jax.jit(init, out_shardings=places)(jax.random.key(0))
  log.info(
    'head for %d classes; fresh: %s',
    *(model.num_classes, ', '.join(fresh) or 'nothing'),
  )
  return tree.unflatten(kept | made)
