"""Weights for other images and heads than their own.

`adapt` interpolates parameters that are loaded, and `resized` those of weights
that are loaded later. The mean and std of pixels, and the head, can be replaced
in the same way. How a run is initialized is described in `transfer`.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import sharding, tree
from vit_jax.arrays.sharding import place, to_host
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size, abstract_params
from vit_jax.weights import patch_embedding
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any


def adapt(
  params: PyTree,
  model: Model,
  source: Pretrained,
  new_size: Size,
  method: str | None,
  mesh: Mesh,
) -> PyTree:
  """Returns parameters for images of another size.

  The paths of the interpolated parameters are logged, with the method and the
  reason for it.

  Args:
    params: parameters of the model, on the mesh.
    model: model for the new size, whose method `adapt` is called.
    source: description of the weights, for the size of their images.
    new_size: (height, width) of the images for the result, pixels.
    method: method of interpolation, see `positions.METHODS`; None for that of
      the weights, or of the model for weights of this package.
    mesh: mesh of the devices.

  Raises:
    UserError: the positions of the weights may be those of the new size.
  """
  old_size, reason = source.image_size, 'position_resize'
  if method is None:
    method = source.description.position_resize
    reason = 'as in the project of the weights' if method else 'as in the paper'
  if tuple(old_size) == tuple(new_size):
    return params
  # If a file does not contain its image size, its grid was guessed. The new
  # size may be the true one if it has as many patches as the guess, or as the
  # other grid that fits; then nothing must be interpolated.
  other_patches = source.description.other_patches
  vit: Any = model  # only files of Vision Transformers have `other_patches`
  if other_patches and math.prod(vit.grid(new_size)) in (
    other_patches,
    math.prod(vit.grid(old_size)),
  ):
    config = {
      'architecture': 'vit',
      'pretrained_cfg': {'input_size': [3, *new_size]},
    }
    raise UserError(
      f'the positions in {source.path} fit images of {old_size} and of '
      f'{new_size} pixels. Write the right size into a config.json next to it: '
      f'{json.dumps(config)}.'
    )
  flat = tree.flatten(params)
  sized = {
    path: to_host(leaf, mesh)
    for path, leaf in flat.items()
    if path.startswith(model.sized)
  }
  adapted = model.adapt(sized, old_size, new_size, method)
  for path, array in adapted.items():
    if np.array_equal(array, sized[path]):
      continue  # for example a table of Swin whose windows stay the same
    log.info(
      '%s interpolated (%s: %s) from %s to %s, for %s instead of %s pixels',
      path,
      reason,
      method or "the model's method",
      sized[path].shape,
      array.shape,
      new_size,
      old_size,
    )
  return tree.unflatten(flat | placed(adapted, flat, model, mesh))


def placed(
  arrays: dict[str, np.ndarray],
  flat: dict[str, jax.Array],
  model: Model,
  mesh: Mesh,
) -> dict[str, jax.Array]:
  """Puts changed parameters on a mesh, with the dtypes of the former ones."""
  shapes = {
    path: jax.ShapeDtypeStruct(array.shape, flat[path].dtype)
    for path, array in arrays.items()
  }
  shardings = sharding.with_shardings(shapes, mesh, model.sharding_rules)
  return {path: place(a, shardings[path]) for path, a in arrays.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Resized(Pretrained):
  """Weights that are adapted to another image size when they are loaded.

  Attributes:
    original: the same weights for their own image size.
  """

  original: Pretrained

  def weights(self, mesh: Mesh) -> dict[str, PyTree]:
    """Loads all sets of weights; see `Pretrained.weights`."""
    sets = self.original.weights(mesh)
    return {name: self._adapted(sets[name], mesh) for name in sets}

  def load_weights(self, mesh: Mesh) -> PyTree:
    """Loads the parameters; see `Pretrained.load_weights`."""
    return self._adapted(self.original.load_weights(mesh), mesh)

  def _adapted(self, params: PyTree, mesh: Mesh) -> PyTree:
    """Returns parameters of the objective for the new image size."""
    source, objective = self.original, self.original.objective()
    model, size = source.model(), self.image_size
    adapted = adapt(objective.backbone(params), model, source, size, None, mesh)
    params = objective.start_params(params, adapted)
    flat = tree.flatten(params)
    expected = tree.flatten(self.abstract_weights(mesh))
    # Parameters lack the state that only `load_weights` adds.
    expected = {path: expected[path] for path in expected if path in flat}
    tree.check_shapes(self.path, tree.shapes(flat), tree.shapes(expected))
    return params


def resized(source: Pretrained, image_size: Size) -> Pretrained:
  """Returns weights for images of another size.

  Args:
    source: description of the weights.
    image_size: (height, width) of the images, pixels.

  Returns:
    A description whose loaders interpolate what depends on the image size, as
    `load_pretrained` does. They raise UserError if the objective has parameters
    of the old size that cannot be interpolated.
  """
  if tuple(image_size) == tuple(source.image_size):
    return source

  def load(abstract: PyTree) -> PyTree:
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    params = source.load(source.abstract_params(mesh))
    return result._adapted(params, mesh)

  description = dataclasses.replace(source.description, image_size=image_size)
  result = _Resized(source.path, description, load, original=source)
  return result


def renormalized(
  source: Pretrained,
  mean: Sequence[float] | None,
  std: Sequence[float] | None,
) -> Pretrained:
  """Returns weights for pixels with another mean or std than was assumed.

  Args:
    source: description of the weights.
    mean: mean of each channel of pixels in [0, 1]; None for that of `source`.
    std: standard deviation of the same pixels; None for that of `source`.

  Raises:
    UserError: the weights are those of this package or official ones, whose
      pixels are in [-1, 1].
  """
  if isinstance(source, _Resized):
    changed = renormalized(source.original, mean, std)
    return resized(changed, source.image_size)
  old = source.description.statistics
  if old is None:
    raise UserError(
      f'{source.path} needs pixels in [-1, 1]; mean and std are for weights of '
      'other projects.'
    )
  new = tuple(mean or old[0]), tuple(std or old[1])

  def load(abstract: PyTree) -> PyTree:
    params, objective = source.load(abstract), source.objective()
    flat = tree.flatten(objective.backbone(params))
    targets = tree.flatten(objective.backbone(abstract))
    keys = patch_embedding.KERNEL, patch_embedding.BIAS
    arrays = {key: np.asarray(flat[key]) for key in keys}
    # The assumed mean and std are unfolded, and the new ones folded in.
    arrays = patch_embedding.converted(arrays, patch_embedding.NONE, old)
    arrays = patch_embedding.converted(arrays, new)
    placed = {key: place(arrays[key], targets[key]) for key in keys}
    return objective.start_params(params, tree.unflatten(flat | placed))

  description = dataclasses.replace(source.description, statistics=new)
  return dataclasses.replace(source, description=description, load=load)


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
  """
  expected = tree.flatten(abstract_params(model, image_size))
  flat = tree.flatten(params)
  fresh = {
    path: leaf
    for path, leaf in expected.items()
    if path not in flat or flat[path].shape != leaf.shape
  }
  kept = {path: flat[path] for path in expected if path not in fresh}

  def init(key: jax.Array) -> dict[str, jax.Array]:
    images = jnp.zeros((1, *image_size, model.channels))
    initial = tree.flatten(model.init(key, images)['params'])
    return {path: initial[path] for path in fresh}

  placed = sharding.with_shardings(fresh, mesh, model.sharding_rules)
  shardings = {path: leaf.sharding for path, leaf in placed.items()}
  initial = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
  log.info(
    'head for %d classes; fresh: %s',
    model.num_classes,
    ', '.join(fresh) or 'nothing',
  )
  return tree.unflatten(kept | initial)
