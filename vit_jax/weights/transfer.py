"""Weights for another image size, and for another training."""

import logging
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from vit_jax import checkpoint
from vit_jax.arrays import sharding, tree
from vit_jax.arrays.host import place, to_host
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size
from vit_jax.objectives.contract import Objective
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

  @property
  def objective(self) -> Objective: ...

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
  wanted, came = _wanted(target), _came(source, target, method)
  fresh = target.model.fresh
  body = {k: v for k, v in came.items() if not k.startswith(fresh)}
  of_model = {k: v for k, v in wanted.items() if not k.startswith(fresh)}
  checkpoint.check_shapes(source.path, _shapes(body), _shapes(of_model))
  return _started(body, target)


def start(source: Pretrained, target: Target, method: str) -> PyTree:
  """Parameters for a training that starts from weights: all that fits.

  Args:
    source: of the weights.
    target: the training; what the weights lack, or hold in another shape, is
      initialised.
    method: of resizing what depends on the image size.

  Raises:
    UserError: nothing fits.
  """
  wanted, came = _wanted(target), _came(source, target, method)
  shapes = _shapes(wanted)
  fitting = {k: v for k, v in came.items() if shapes.get(k) == v.shape}
  if not fitting:
    raise UserError(
      f'nothing of {source.path} fits the model: it holds '
      f'{", ".join(sorted(came)[:3])}, …, and the model takes '
      f'{", ".join(sorted(wanted)[:3])}, …. Give weights of such a model as '
      'config.init_from.'
    )
  left = [
    f'{k} {leaf.shape} (here {shapes.get(k, "none")})'
    for k, leaf in came.items()
    if k not in fitting
  ]
  if left:
    log.warning('not taken over from %s: %s', source.path, ', '.join(left))
  return _started(fitting, target)


def _came(source: Pretrained, target: Target, method: str) -> dict[str, Any]:
  """The model's parameters in a source by path, for the target's images."""
  mesh = target.mesh
  params = source.backbone(source.load(source.abstract_params(mesh)))
  sizes = source.image_size, target.image_size
  return tree.flatten(adapt(params, target.model, *sizes, method, mesh))


def _wanted(target: Target) -> dict[str, Any]:
  """Shapes of the model's parameters in the target, by path."""
  params = target.abstract_state().params
  return tree.flatten(jax.eval_shape(target.objective.backbone, params))


def _shapes(flat: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  return {path: tuple(leaf.shape) for path, leaf in flat.items()}


def _started(taken: dict[str, jax.Array], target: Target) -> PyTree:
  """The objective's parameters: fresh, with those of the model taken over."""
  objective = target.objective

  def init(taken: dict[str, jax.Array], key: jax.Array) -> PyTree:
    params = target.init_state(key).params
    model = tree.flatten(objective.backbone(params)) | taken
    return objective.start_params(params, tree.unflatten(model))

  fresh = [path for path in _wanted(target) if path not in taken]
  log.info(
    'weights taken over: %s; fresh: %s',
    f'{tree.size(taken):,}',
    ', '.join(fresh) or 'none',
  )
  state = target.abstract_state().params
  places = jax.tree.map(lambda leaf: leaf.sharding, state)
  started = jax.jit(init, donate_argnums=0, out_shardings=places)
  return started(taken, target.key())
