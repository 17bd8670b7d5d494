"""Adapts weights to another image size, and initializes runs with weights."""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from vit_jax import checkpoint
from vit_jax.arrays import sharding, tree
from vit_jax.arrays.host import place, to_host
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size, Statistics, is_symmetric
from vit_jax.objectives.contract import Objective
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import normalization

log = logging.getLogger('vit_jax')
PyTree = Any
_RGB = 3  # channels of the images that most weights are for


class Target(Protocol):
  """A training run that is initialized with weights."""

  @property
  def mesh(self) -> Mesh: ...

  @property
  def model(self) -> Model: ...

  @property
  def image_size(self) -> Size: ...

  @property
  def objective(self) -> Objective: ...

  def abstract_state(self) -> Any:
    """Returns shapes and shardings of the state, including `params`."""
    ...

  def init_state(self, key: jax.Array) -> Any:
    """Returns the initial state; it is called inside `jax.jit`."""
    ...

  def key(self) -> jax.Array:
    """Returns the random key of the run."""
    ...


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
    method: method of interpolation, see `resizing.METHODS`; None for that of
      the weights, or of the model for weights of this package.
    mesh: mesh of the devices.

  Raises:
    UserError: the positions of the weights may be those of the new size.
  """
  old_size, reason = source.image_size, 'position_resize'
  if method is None:
    method = source.about.get('position_resize')
    reason = 'as in the project of the weights' if method else 'as in the paper'
  if tuple(old_size) == tuple(new_size):
    return params
  other_patches = source.about.get('other_patches')
  grid: Any = getattr(model, 'grid', None)  # models that process tokens
  if other_patches and math.prod(grid(new_size)) == other_patches:
    height, width = new_size
    raise UserError(
      f'the positions in {source.path} fit images of {height}x{width} pixels '
      f'and, without positions of other tokens than patches, of {old_size[0]}x'
      f'{old_size[1]} pixels; the file does not contain its image size. Write '
      'it into a config.json next to the file: {"architecture": "vit", '
      f'"pretrained_cfg": {{"input_size": [3, {height}, {width}]}}}}.'
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
      '%s interpolated (%s: %s) from %dx%d to %dx%d pixels, %s to %s',
      path,
      reason,
      method or "the model's method",
      *old_size,
      *new_size,
      'x'.join(map(str, sized[path].shape)),
      'x'.join(map(str, array.shape)),
    )
  shapes = {
    path: jax.ShapeDtypeStruct(array.shape, flat[path].dtype)
    for path, array in adapted.items()
  }
  shardings = sharding.with_shardings(shapes, mesh, model.sharding_rules)
  placed = {path: place(a, shardings[path]) for path, a in adapted.items()}
  return tree.unflatten(flat | placed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Resized(Pretrained):
  """Weights that are adapted to another image size when they are loaded.

  Attributes:
    original: the same weights for their own image size.
  """

  original: Pretrained

  def weights(self, mesh: Mesh) -> dict[str, PyTree]:
    """Loads all sets of weights; see `Pretrained.weights`."""
    if self.original.load_extra is None:
      return super().weights(mesh)
    return {
      name: _adapted(self.original, params, self.image_size, mesh)
      for name, params in self.original.weights(mesh).items()
    }


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

  def adapting(load: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    def load_and_adapt(abstract: PyTree) -> PyTree:
      mesh = jax.tree.leaves(abstract)[0].sharding.mesh
      params = load(source.abstract_params(mesh))
      params = _adapted(source, params, image_size, mesh)
      actual, expected = tree.flatten(params), tree.flatten(abstract)
      checkpoint.check_shapes(source.path, _shapes(actual), _shapes(expected))
      return params

    return load_and_adapt

  return _Resized(
    path=source.path,
    about=source.about | {'image_size': list(image_size)},
    load=adapting(source.load),
    load_average=source.load_average and adapting(source.load_average),
    load_extra=None,
    original=source,
  )


def _adapted(
  source: Pretrained, params: PyTree, image_size: Size, mesh: Mesh
) -> PyTree:
  """Returns parameters of the objective for images of another size."""
  objective = source.objective()
  model = adapt(
    objective.backbone(params), source.model(), source, image_size, None, mesh
  )
  return objective.start_params(params, model)


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
  expected = _model_shapes(target)
  actual = _model_params(source, target, method)
  missing = [
    prefix
    for prefix in target.model.replaceable
    if not any(path.startswith(prefix) for path in expected.keys() & actual)
  ]
  fresh = (*target.model.fresh, *missing)
  body = {k: v for k, v in actual.items() if not k.startswith(fresh)}
  of_model = {k: v for k, v in expected.items() if not k.startswith(fresh)}
  checkpoint.check_shapes(source.path, _shapes(body), _shapes(of_model))
  return _initialized(body, target)


def start(source: Pretrained, target: Target, method: str | None) -> PyTree:
  """Returns initial parameters, with all that fit taken from the source.

  Args:
    source: description of the weights.
    target: run; parameters that are missing in the source, or have another
      shape there, are newly initialized.
    method: method of interpolation for parameters that depend on the image
      size; see `adapt`.

  Raises:
    UserError: no parameter fits.
  """
  expected = _model_shapes(target)
  actual = _model_params(source, target, method)
  shapes = _shapes(expected)
  fitting = {k: v for k, v in actual.items() if shapes.get(k) == v.shape}
  if not fitting:
    raise UserError(
      f'no parameter of {source.path} fits the model: it contains '
      f'{", ".join(sorted(actual)[:3])}, …, and the model has '
      f'{", ".join(sorted(expected)[:3])}, …. Set config.init_from to weights '
      'of such a model.'
    )
  unused = [
    f'{k} {leaf.shape} (in the model: {shapes.get(k, "none")})'
    for k, leaf in actual.items()
    if k not in fitting
  ]
  if unused:
    log.warning('not taken over from %s: %s', source.path, ', '.join(unused))
  return _initialized(fitting, target)


def _model_params(
  source: Pretrained, target: Target, method: str | None
) -> dict[str, Any]:
  """Returns a source's model parameters, adapted to the images of a target."""
  mesh = target.mesh
  params = source.backbone(source.load(source.abstract_params(mesh)))
  size, model = target.image_size, target.model
  flat = tree.flatten(adapt(params, model, source, size, method, mesh))
  before = source.model()
  if before.channels != target.model.channels:
    return _with_channels(flat, before, target)
  return _in_units_of(target.model, before, flat, mesh)


def _in_units_of(
  model: Model, before: Model, flat: dict[str, jax.Array], mesh: Mesh
) -> dict[str, jax.Array]:
  """Converts parameters to the normalization of a model.

  The function of an image stays the same, with an exception: weights for
  photographs are used for images with a mean and std of their own as if these
  were photographs that are normalized by the mean and std of ImageNet. Both
  inputs then have the mean 0 and the standard deviation 1.

  Args:
    model: model that the parameters are converted for.
    before: model that the parameters are from.
    flat: parameters by path.
    mesh: mesh of the devices.
  """
  if model.normalization == before.normalization:
    return flat
  statistics = model.normalization
  if _is_own(statistics) and not _is_own(before.normalization):
    statistics = normalization.IMAGENET
    if not _has_patch_embedding(flat, before):
      return flat  # scales are normalized after the first convolution
  paths = normalization.KERNEL, normalization.BIAS
  arrays = {path: to_host(flat[path], mesh) for path in paths if path in flat}
  arrays = normalization.symmetric(arrays, before.normalization)
  arrays = normalization.unfold(arrays, *statistics)
  log.info(
    'the patch embedding is converted to pixels normalized by mean %s, std %s',
    *statistics,
  )
  placed = {
    path: place(
      array,
      jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=flat[path].sharding
      ),
    )
    for path, array in arrays.items()
  }
  return flat | placed


def _is_own(statistics: Statistics) -> bool:
  """Returns whether a model normalizes images by their own mean and std."""
  return not is_symmetric(statistics) and statistics != normalization.IMAGENET


def _has_patch_embedding(flat: dict[str, Any], model: Model) -> bool:
  """Returns whether the first layer is a patch embedding, not a convolution."""
  kernel = flat.get(normalization.KERNEL)
  return kernel is not None and kernel.shape[-2] == model.channels


def _with_channels(
  flat: dict[str, jax.Array], before: Model, target: Target
) -> dict[str, jax.Array]:
  """Returns parameters whose first layer receives other channels than RGB.

  If the target normalizes its images by their own mean and std, a patch
  embedding is first converted to normalized images, see `_in_units_of`.

  Args:
    flat: parameters by path.
    before: model that the parameters are from.
    target: run that is initialized.

  Raises:
    UserError: the parameters are not for RGB images.
  """
  model, mesh = target.model, target.mesh
  if before.channels != _RGB:
    raise UserError(
      f'model.channels is {model.channels}, but the weights are for images of '
      f'{before.channels} channels: set model.channels, augment.channels and '
      f'preprocess.channels to {before.channels}. Only weights for RGB images '
      'are adapted to other channels.'
    )
  expected = _model_shapes(target)
  kernels = [
    path
    for path, leaf in flat.items()
    if leaf.ndim == 4
    and leaf.shape[2] == _RGB
    and path in expected
    and expected[path].shape == (*leaf.shape[:2], model.channels, leaf.shape[3])
  ]
  if len(kernels) != 1:
    return flat  # the model differs in more than the channels
  first = kernels[0]
  paths = {first, normalization.BIAS} & flat.keys()
  arrays = {path: to_host(flat[path], mesh) for path in paths}
  if first == normalization.KERNEL:
    statistics = before.normalization
    arrays = normalization.symmetric(arrays, statistics)
    if not is_symmetric(model.normalization):
      own = _is_own(statistics)
      arrays = normalization.unfold(
        arrays, *(statistics if own else normalization.IMAGENET)
      )
  arrays[first] = _repeated(arrays[first], model.channels)
  log.info(
    '%s adapted from 3 to %d channels: %s',
    first,
    model.channels,
    'the sum of the three'
    if model.channels == 1
    else f'the three in turn, times 3/{model.channels}',
  )
  shapes = {
    path: jax.ShapeDtypeStruct(array.shape, flat[path].dtype)
    for path, array in arrays.items()
  }
  shardings = sharding.with_shardings(shapes, mesh, model.sharding_rules)
  return flat | {path: place(a, shardings[path]) for path, a in arrays.items()}


def _repeated(
  kernel: Float[np.ndarray, 'y x 3 d'], channels: int
) -> Float[np.ndarray, 'y x c d']:
  """Adapts a kernel for RGB to other channels, as timm's `adapt_input_conv`.

  One channel gets the sum of the three. More channels get the three in turn,
  scaled so that the sum over all channels stays about the same.
  """
  if channels == 1:
    return kernel.sum(axis=2, keepdims=True)
  kernel = kernel[:, :, np.arange(channels) % _RGB] * (_RGB / channels)
  return kernel.astype(np.float32)


def _model_shapes(target: Target) -> dict[str, Any]:
  """Returns the shapes of the target's model parameters by path."""
  params = target.abstract_state().params
  return tree.flatten(jax.eval_shape(target.objective.backbone, params))


def _shapes(flat: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  return {path: tuple(leaf.shape) for path, leaf in flat.items()}


def _initialized(taken: dict[str, jax.Array], target: Target) -> PyTree:
  """Returns the objective's initial parameters, some of them replaced.

  Args:
    taken: parameters of the model that replace initial ones, by path.
    target: run that is initialized.
  """
  objective = target.objective

  def init(taken: dict[str, jax.Array], key: jax.Array) -> PyTree:
    params = target.init_state(key).params
    model = tree.flatten(objective.backbone(params)) | taken
    return objective.start_params(params, tree.unflatten(model))

  fresh = [path for path in _model_shapes(target) if path not in taken]
  log.info(
    'weights taken over: %s; fresh: %s',
    f'{tree.size(taken):,}',
    ', '.join(fresh) or 'none',
  )
  state = target.abstract_state().params
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  # Donated, so that a large model is not twice in memory.
  started = jax.jit(init, donate_argnums=0, out_shardings=shardings)
  return started(taken, target.key())
