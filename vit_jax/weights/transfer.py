"""Initializes runs with weights.

There are three ways: `transfer` for fine-tuning, with a new head; `body` for
the weights that LoRA leaves frozen; and `start`, which takes all that fits. All
of them adapt the weights to the images of the run first (`_model_params`).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import sharding, tree
from vit_jax.arrays.sharding import to_host
from vit_jax.config import schema
from vit_jax.config.identity import Changes, differences
from vit_jax.data import filters
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.models.contract import (
  Model,
  Size,
  abstract_key,
  abstract_params,
)
from vit_jax.run.resume import formatted
from vit_jax.weights import patch_embedding, resizing
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any
Target = Any  # `training.experiment.Experiment`, of a higher package


def transfer(source: Pretrained, target: Target, method: str | None) -> PyTree:
  """Returns parameters for fine-tuning: those of the source with a new head.

  Args:
    source: description of the weights.
    target: fine-tuning run; the parameters that `model.fresh` lists are newly
      initialized, and those of `model.replaceable` if the source lacks them.
    method: method of interpolation for parameters that depend on the image
      size; see `resizing.adapt`.

  Raises:
    UserError: the other parameters do not fit the model of the target.
  """
  taken = body(source, target, method, target.model.replaceable)
  return _initialized(taken, target)


class Base(NamedTuple):
  """A model whose parameters are all taken from weights, except for its head.

  Attributes:
    model: model.
    image_size: (height, width) of its images, pixels.
    mesh: mesh of the devices.
  """

  model: Model
  image_size: Size
  mesh: Mesh


def body(
  source: Pretrained,
  target: Target | Base,
  method: str | None,
  replaceable: tuple[str, ...] = (),
) -> dict[str, Any]:
  """Returns the parameters of a model without those of `model.fresh`, by path.

  Args:
    source: description of the weights.
    target: run or model.
    method: see `resizing.adapt`.
    replaceable: path prefixes of parameters that the source may lack.

  Raises:
    UserError: the parameters do not fit the model.
  """
  expected = tree.shapes(abstract_params(target.model, target.image_size))
  actual, _ = _model_params(source, target, method)
  missing = [
    prefix
    for prefix in replaceable
    if not any(path.startswith(prefix) for path in expected.keys() & actual)
  ]
  fresh = (*target.model.fresh, *missing)
  taken = {k: v for k, v in actual.items() if not k.startswith(fresh)}
  needed = {k: v for k, v in expected.items() if not k.startswith(fresh)}
  tree.check_shapes(source.path, tree.shapes(taken), needed)
  return taken


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
      size; see `resizing.adapt`.
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
  expected = tree.shapes(abstract_params(target.model, target.image_size))
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
  of_run = tree.shapes(target.abstract_state.params)
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
  axes = _class_axes(parts, target)
  names = source.description.class_names
  order = filters.outputs(data, names, source.path) if any(axes) else None
  if order is None:  # the classes have no names, or the same order
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
    return flat | resizing.placed(arrays, flat, target.model, target.mesh)

  return [ordered(*each) for each in zip(parts, axes, strict=True)]


def _class_axes(
  parts: Sequence[dict[str, Any]], target: Target
) -> list[dict[str, int]]:
  """Returns the axes that are longer if there is one more class, by path.

  Args:
    parts: parameters of the model, and others of the objective, by path.
    target: run that is initialized.
  """
  config = target.config.copy_and_resolve_references()
  # Key of the objective's section that is its number of classes, if it has one
  if key := target.objective.classes_key:
    config.objective[key] += 1
  else:
    config.num_classes += 1
  model = schema.build_section(config, 'model', config.num_classes)
  setting = target.setting._replace(model=model)
  larger = schema.build_section(config, 'objective', setting)
  inputs = abstract_key(), target.abstract_batch()
  shape, _ = jax.eval_shape(larger.init, *inputs)
  shapes = [tree.flatten(each) for each in (larger.backbone(shape), shape)]
  return [
    {
      path: axis
      for path, leaf in part.items()
      for axis, length in enumerate(expected[path].shape)
      if length != leaf.shape[axis]
    }
    for part, expected in zip(parts, shapes, strict=True)
  ]


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
  # `backbone` selects leaves without copying them.
  of_model = {id(leaf) for leaf in jax.tree.leaves(params)}
  flat = tree.flatten(loaded)
  others = {k: leaf for k, leaf in flat.items() if id(leaf) not in of_model}
  params = resizing.adapt(
    params, target.model, source, target.image_size, method, mesh
  )
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
  first = _first_kernel(flat, before, target)
  if first is None:
    return flat
  paths = {first, patch_embedding.BIAS} & flat.keys()
  arrays = {path: to_host(flat[path], mesh) for path in paths}
  if first == patch_embedding.KERNEL:
    statistics = patch_embedding.statistics_for(before, model)
    arrays = patch_embedding.converted(arrays, old, statistics)
    log.info('%s converted to pixels normalized by %s', first, statistics)
  if channels != before.channels:
    arrays[first] = patch_embedding.repeated(arrays[first], channels)
    log.info('%s adapted from 3 to %d channels', first, channels)
  return flat | resizing.placed(arrays, flat, model, mesh)


def _first_kernel(
  flat: dict[str, jax.Array], before: Model, target: Target
) -> str | None:
  """Returns the path of the kernel that is converted to the pixels of a target.

  It is None if nothing is converted. Arguments and errors are those of
  `_fit_first_layer`.
  """
  model = target.model
  channels = model.channels
  if channels != before.channels:
    if before.channels != patch_embedding.RGB:
      raise UserError(
        f'model.channels is {channels}, but the weights are for '
        f'{before.channels}, and only weights for RGB are adapted: set '
        'model.channels, augment.channels and preprocess.channels to this.'
      )
    shapes = tree.shapes(abstract_params(model, target.image_size))
    kernels = [
      path
      for path, leaf in flat.items()
      if leaf.ndim == 4
      and leaf.shape[2] == patch_embedding.RGB
      and shapes.get(path) == (*leaf.shape[:2], channels, leaf.shape[3])
    ]
    # Otherwise, the model differs in more than the channels.
    return kernels[0] if len(kernels) == 1 else None
  first = patch_embedding.KERNEL
  statistics = before.normalization, model.normalization
  was_own, is_own = (patch_embedding.is_own(each) for each in statistics)
  if is_own and not was_own:
    # The first layer of a ResNet or a hybrid is a convolution, and norms after
    # it remove the scale of its inputs.
    if first not in flat or flat[first].shape[-2] != channels:
      return None
  return first


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

  shapes = tree.shapes(abstract_params(target.model, target.image_size))
  fresh = [path for path in shapes if path not in taken]
  log.info(
    'weights taken over: %s; fresh: %s',
    f'{tree.size(taken) + tree.size(others):,}',
    ', '.join(fresh) or 'none',
  )
  state = target.abstract_state.params
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  # Donated, so that a large model is not twice in memory.
  started = jax.jit(init, donate_argnums=(0, 1), out_shardings=shardings)
  key = sharding.random_key(target.config.seed, target.mesh)
  return started(taken, dict(others), key)
