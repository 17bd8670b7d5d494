"""Adapts weights to other images and heads, and initializes runs with them."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import sharding, tree
from vit_jax.arrays.sharding import place, to_host
from vit_jax.checkpoint import check_shapes
from vit_jax.config import schema
from vit_jax.config.identity import Changes, differences
from vit_jax.data import filters
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size, abstract_params
from vit_jax.run.resume import formatted
from vit_jax.weights import patch_embedding
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any
Target = Any  # `training.experiment.Experiment`, of a higher package


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
  other_patches = source.description.other_patches
  grid: Any = getattr(model, 'grid', None)  # models that process tokens
  if other_patches and math.prod(grid(new_size)) in (
    other_patches,
    math.prod(grid(old_size)),
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
  return tree.unflatten(flat | _placed(adapted, flat, model, mesh))


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
    expected = {path: expected[path] for path in expected if path in flat}
    check_shapes(self.path, _shapes(flat), _shapes(expected))
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
    flat, targets = tree.flatten(source.load(abstract)), tree.flatten(abstract)
    keys = patch_embedding.KERNEL, patch_embedding.BIAS
    arrays = {key: np.asarray(flat[key]) for key in keys}
    arrays = patch_embedding.converted(arrays, patch_embedding.NONE, old)
    arrays = patch_embedding.converted(arrays, new)
    placed = {key: place(arrays[key], targets[key]) for key in keys}
    return tree.unflatten(flat | placed)

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


def transfer(source: Pretrained, target: Target, method: str | None) -> PyTree:
  """Returns parameters for fine-tuning: those of the source with a new head.

  Args:
    source: description of the weights.
    target: fine-tuning run; the parameters that `model.fresh` lists are newly
      initialized, and those of `model.replaceable` if the source lacks them.
    method: method of interpolation for parameters that depend on the image
      size; see `adapt`.

  Raises:
    UserError: the other parameters do not fit the model of the target.
  """
  expected = _model_shapes(target.model, target.image_size)
  actual, _ = _model_params(source, target, method)
  missing = [
    prefix
    for prefix in target.model.replaceable
    if not any(path.startswith(prefix) for path in expected.keys() & actual)
  ]
  fresh = (*target.model.fresh, *missing)
  body = {k: v for k, v in actual.items() if not k.startswith(fresh)}
  of_model = {k: v for k, v in expected.items() if not k.startswith(fresh)}
  check_shapes(source.path, _shapes(body), of_model)
  return _initialized(body, target)


class Base(NamedTuple):
  """A model that uses all parameters of weights except for some.

  Attributes:
    model: model.
    image_size: (height, width) of its images, pixels.
    mesh: mesh of the devices.
    without: path prefixes of the parameters that are not taken.
  """

  model: Model
  image_size: Size
  mesh: Mesh
  without: tuple[str, ...]


def base(source: Pretrained, target: Base, method: str | None) -> PyTree:
  """Returns the parameters of weights, adapted to a model.

  Args:
    source: description of the weights.
    target: model, and the parameters that it does not take.
    method: see `adapt`.

  Raises:
    UserError: the parameters do not fit the model.
  """
  expected = _model_shapes(target.model, target.image_size)
  actual, _ = _model_params(source, target, method)
  kept, of_model = (
    {k: v for k, v in each.items() if not k.startswith(target.without)}
    for each in (actual, expected)
  )
  check_shapes(source.path, _shapes(kept), of_model)
  return tree.unflatten(kept)


def start(
  source: Pretrained, target: Target, method: str | None, data: Source
) -> PyTree:
  """Returns initial parameters, with all that fit taken from the source.

  Parameters next to those of the model, such as a decoder, are taken if the
  objective of the weights is that of the run. A warning lists the keys of the
  model that differ from those of the weights.

  Args:
    source: description of the weights.
    target: run; parameters that are missing in the source, or have another
      shape there, are newly initialized.
    method: method of interpolation for parameters that depend on the image
      size; see `adapt`.
    data: training examples, by whose class names the outputs of a head are
      ordered.

  Raises:
    UserError: no parameter fits, or a head that fits is for other classes.
  """
  if changes := _differences(source.model(), target.model):
    log.warning(
      'the model is not that of %s, because these keys differ:%s',
      source.path,
      formatted(changes, 'in the weights', 'in the config'),
    )
  expected = _model_shapes(target.model, target.image_size)
  actual, others = _model_params(source, target, method)
  fitting, unused = _fitting(actual, expected)
  if not fitting:
    raise UserError(
      f'no parameter of {source.path} ({", ".join(sorted(actual)[:3])}, …) '
      f'fits the model ({", ".join(sorted(expected)[:3])}, …): set another '
      'config.init_from.'
    )
  if type(source.objective()) is not type(target.objective):
    others = {}
  of_run = _shapes(tree.flatten(target.abstract_state().params))
  others, others_unused = _fitting(others, of_run)
  if unused := unused + others_unused:
    log.warning('not taken over from %s: %s', source.path, ', '.join(unused))
  fitting, others = _by_class((fitting, others), source, target, data)
  return _initialized(fitting, target, others)


def _differences(before: Model, after: Model) -> Changes:
  """Returns the keys of the section `model` that change the model's function.

  Args:
    before: model of the weights.
    after: model that starts from them.
  """
  old, new = ({**m.architecture, **m.options} for m in (before, after))
  changes = differences(old, {key: new.get(key, old[key]) for key in old})
  return {
    f'model.{key}': pair
    for key, pair in changes.items()
    if key not in after.initial or None in pair
  }


def _by_class(
  parts: Sequence[dict[str, Any]],
  source: Pretrained,
  target: Target,
  data: Source,
) -> list[dict[str, Any]]:
  """Orders the outputs of heads as the classes of a run.

  Args:
    parts: parameters of the model, and others of the objective, by path.
    source: description of the weights, with the names of their classes.
    target: run that is initialized.
    data: training examples.

  Raises:
    UserError: the data has a class that the weights do not have.
  """
  if not target.objective.num_classes:
    return list(parts)
  # The outputs are the axes that are longer if there is one more class.
  config = target.config.copy_and_resolve_references()
  key = target.objective.classes_key
  (config.objective if key else config)[key or 'num_classes'] += 1
  model = schema.build_section(config, 'model', config.num_classes)
  setting = target.setting._replace(model=model)
  larger = schema.build_section(config, 'objective', setting)
  shape, _ = jax.eval_shape(
    larger.init, jax.eval_shape(target.key), target.abstract_batch()
  )
  shapes = [tree.flatten(each) for each in (larger.backbone(shape), shape)]
  axes = [
    {
      path: axis
      for path, leaf in part.items()
      for axis, length in enumerate(expected[path].shape)
      if length != leaf.shape[axis]
    }
    for part, expected in zip(parts, shapes, strict=True)
  ]
  names = source.description.class_names
  order = filters.outputs(data, names, source.path) if any(axes) else None
  if order is None:
    return list(parts)
  log.warning(
    '%s: the outputs of the head are ordered by name, because the order of the '
    'classes differs from that of %s',
    source.path,
    data.name,
  )
  # Outputs without a class in the data follow.
  order += sorted({*range(target.objective.num_classes)} - {*order})

  def ordered(flat: dict[str, Any], axes: dict[str, int]) -> dict[str, Any]:
    arrays = {
      path: np.take(to_host(flat[path], target.mesh), order, axis)
      for path, axis in axes.items()
    }
    return flat | _placed(arrays, flat, target.model, target.mesh)

  return [ordered(*each) for each in zip(parts, axes, strict=True)]


def _fitting(
  flat: dict[str, Any], expected: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Any], list[str]]:
  """Returns the parameters that have an expected shape; describes the others.

  Args:
    flat: parameters by path.
    expected: shapes by path.
  """
  fitting = {k: v for k, v in flat.items() if expected.get(k) == v.shape}
  unused = [
    f'{k} {leaf.shape} (in the model: {expected.get(k, "none")})'
    for k, leaf in flat.items()
    if k not in fitting
  ]
  return fitting, unused


def _model_params(
  source: Pretrained, target: Target, method: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns a source's model parameters, and those of its objective.

  The former are adapted to the images of a target.
  """
  mesh = target.mesh
  loaded = source.load(source.abstract_params(mesh))
  params = source.backbone(loaded)
  of_model = {id(leaf) for leaf in jax.tree.leaves(params)}
  flat = tree.flatten(loaded)
  others = {k: leaf for k, leaf in flat.items() if id(leaf) not in of_model}
  params = adapt(params, target.model, source, target.image_size, method, mesh)
  adapted = _fit_first_layer(tree.flatten(params), source.model(), target)
  return adapted, others


def _fit_first_layer(
  flat: dict[str, jax.Array], before: Model, target: Target
) -> dict[str, jax.Array]:
  """Converts the first layer to the channels, mean and std of a target.

  See `patch_embedding.statistics_for` for the meaning of the parameters.

  Args:
    flat: parameters by path.
    before: model that the parameters are from.
    target: run that is initialized.

  Raises:
    UserError: the channels differ, and the parameters are not for RGB images;
      or the first layer is a convolution, and the mean or std differ.
  """
  model, mesh = target.model, target.mesh
  old, new = before.normalization, model.normalization
  channels = model.channels
  if old == new and channels == before.channels:
    return flat
  first = patch_embedding.KERNEL
  if channels != before.channels:
    if before.channels != patch_embedding.RGB:
      raise UserError(
        f'model.channels is {channels}, but the weights are for '
        f'{before.channels}, and only weights for RGB are adapted: set '
        'model.channels, augment.channels and preprocess.channels to this.'
      )
    shapes = _model_shapes(model, target.image_size)
    kernels = [
      path
      for path, leaf in flat.items()
      if leaf.ndim == 4
      and leaf.shape[2] == patch_embedding.RGB
      and shapes.get(path) == (*leaf.shape[:2], channels, leaf.shape[3])
    ]
    if len(kernels) != 1:
      return flat  # the model differs in more than the channels
    first = kernels[0]
  elif patch_embedding.is_own(new) and not patch_embedding.is_own(old):
    if first not in flat or flat[first].shape[-2] != channels:
      return flat  # scales are normalized after the first convolution
  paths = {first, patch_embedding.BIAS} & flat.keys()
  arrays = {path: to_host(flat[path], mesh) for path in paths}
  if first == patch_embedding.KERNEL:
    statistics = patch_embedding.statistics_for(before, model)
    arrays = patch_embedding.converted(arrays, old, statistics)
    log.info('%s converted to pixels normalized by %s', first, statistics)
  if channels != before.channels:
    arrays[first] = patch_embedding.repeated(arrays[first], channels)
    log.info('%s adapted from 3 to %d channels', first, channels)
  return flat | _placed(arrays, flat, model, mesh)


def _placed(
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


def _model_shapes(model: Model, size: Size) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a model's parameters by path."""
  return _shapes(tree.flatten(abstract_params(model, size)))


def _shapes(flat: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  return {path: tuple(leaf.shape) for path, leaf in flat.items()}


def _initialized(
  taken: dict[str, jax.Array],
  target: Target,
  others: Mapping[str, jax.Array] = {},
) -> PyTree:
  """Returns the objective's initial parameters, some of them replaced.

  Args:
    taken: parameters of the model that replace initial ones, by path.
    target: run that is initialized.
    others: parameters of the objective next to those of the model, by path.
  """
  objective = target.objective

  def init(taken: Any, others: Any, key: jax.Array) -> PyTree:
    params = tree.flatten(target.init_state(key).params) | others
    params = tree.unflatten(params)
    model = tree.flatten(objective.backbone(params)) | taken
    return objective.start_params(params, tree.unflatten(model))

  shapes = _model_shapes(target.model, target.image_size)
  fresh = [path for path in shapes if path not in taken]
  log.info(
    'weights taken over: %s; fresh: %s',
    f'{tree.size(taken) + tree.size(others):,}',
    ', '.join(fresh) or 'none',
  )
  state = target.abstract_state().params
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  # Donated, so that a large model is not twice in memory.
  started = jax.jit(init, donate_argnums=(0, 1), out_shardings=shardings)
  return started(taken, dict(others), target.key())
