"""Replacement of the head of trained weights."""

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
  """Returns parameters with a newly initialized head.

  The paths of the new parameters are logged.

  Args:
    params: parameters of a model with another head.
    model: model with the new head.
    image_size: (height, width) of the images of both models, pixels.
    mesh: mesh of the devices.

  Raises:
    UserError: the models differ in more than the parameters that `model.fresh`
      lists.
  """
  expected = tree.flatten(abstract_params(model, image_size))
  flat = tree.flatten(params)
  fresh = [
    path
    for path, leaf in expected.items()
    if path.startswith(model.fresh)
    and (path not in flat or flat[path].shape != leaf.shape)
  ]
  kept = {
    path: leaf
    for path, leaf in flat.items()
    if path not in fresh
    and (path in expected or not path.startswith(model.fresh))
  }
  checkpoint.check_shapes(
    'the weights',
    {path: leaf.shape for path, leaf in kept.items()},
    {path: leaf.shape for path, leaf in expected.items() if path not in fresh},
  )

  def init(key: jax.Array) -> dict[str, jax.Array]:
    images = jnp.zeros((1, *image_size, model.channels))
    initial = tree.flatten(model.init(key, images)['params'])
    return {path: initial[path] for path in fresh}

  shapes = {path: expected[path] for path in fresh}
  placed = sharding.with_shardings(shapes, mesh, model.sharding_rules)
  shardings = {path: leaf.sharding for path, leaf in placed.items()}
  initial = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
  log.info(
    'head for %d classes; fresh: %s',
    model.num_classes,
    ', '.join(fresh) or 'nothing',
  )
  return tree.unflatten(kept | initial)
