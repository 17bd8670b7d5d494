"""Weights for another image size, and for another training."""

import logging
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from vit_jax import checkpoint
from vit_jax.arrays import sharding, tree
from vit_jax.arrays.host import place, to_host
from vit_jax.models.contract import Model, Size
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any


class Target(Protocol):
  """What a transfer asks of the training that it is for."""

  @property
  def mesh(self) -> Mesh: ...

  @property
  def model(self) -> Model: ...

  @property
  def image_size(self) -> Size: ...

  def abstract_state(self) -> Any:
    """Its state's shapes and shardings; `params` among them."""
    ...

  def init_state(self, key: jax.Array) -> Any:
    """Its first state, as a function to be traced."""
    ...

  def key(self) -> jax.Array:
    """The run's key."""
    ...


def adapt(
  params: PyTree,
  model: Model,
  old_size: Size,
  new_size: Size,
  method: str,
  mesh: Mesh,
) -> PyTree:
  """Parameters for images of another size, see `Model.adapt`; says which.

  Args:
    params: of the model, on the mesh.
    model: built for the new size.
    old_size: (height, width) that the parameters are for, pixels.
    new_size: wanted.
    method: of resizing, such as 'aligned'.
    mesh: of the devices.
  """
  if tuple(old_size) == tuple(new_size):
    return params
  flat = tree.flatten(params)
  sized = {
    path: to_host(leaf, mesh)
    for path, leaf in flat.items()
    if path.startswith(model.sized)
  }
  adapted = model.adapt(sized, old_size, new_size, method)
  for path, array in adapted.items():
    log.info(
      '%s interpolated (%s) from %dx%d to %dx%d pixels, %s to %s',
      *(path, method, *old_size, *new_size),
      *('x'.join(map(str, a.shape)) for a in (sized[path], array)),
    )
  shapes = {
    path: jax.ShapeDtypeStruct(array.shape, flat[path].dtype)
    for path, array in adapted.items()
  }
  places = sharding.with_shardings(shapes, mesh, model.sharding_rules)
  placed = {path: place(a, places[path]) for path, a in adapted.items()}
  return tree.unflatten(flat | placed)


def transfer(source: Pretrained, target: Target, method: str) -> PyTree:
  """Parameters for fine-tuning: the source's body, a fresh head.

  Args:
    source: of the weights.
    target: the fine-tuning; what its model calls `fresh` is initialised.
    method: of resizing what depends on the image size.

  Raises:
    UserError: the body does not fit the target's model.
  """
  mesh, model = target.mesh, target.model
  params = source.backbone(source.load(source.abstract_params(mesh)))
  sizes = source.image_size, target.image_size
  params = adapt(params, model, *sizes, method, mesh)
  wanted = tree.flatten(target.abstract_state().params)
  body = {
    path: leaf
    for path, leaf in tree.flatten(params).items()
    if not path.startswith(model.fresh)
  }
  fresh_paths = [path for path in wanted if path.startswith(model.fresh)]

  def fresh(key: jax.Array) -> dict[str, jax.Array]:
    init = tree.flatten(target.init_state(key).params)
    return {path: init[path] for path in fresh_paths}

  places = {path: wanted[path].sharding for path in fresh_paths}
  flat = body | jax.jit(fresh, out_shardings=places)(target.key())
  checkpoint.check_shapes(
    source.path,
    {path: leaf.shape for path, leaf in flat.items()},
    {path: leaf.shape for path, leaf in wanted.items()},
  )
  log.info(
    'weights taken over: %s; fresh: %s',
    f'{tree.size(body):,}',
    ', '.join(fresh_paths),
  )
  return tree.unflatten(flat)
