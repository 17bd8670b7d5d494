"""Trained weights from anywhere and to anywhere; formats know the rest."""

import dataclasses
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import sharding, tree
from vit_jax.data.augment.transforms import square
from vit_jax.errors import UserError
from vit_jax.weights.contract import Format, Pretrained
from vit_jax.weights.formats import (
  big_vision,
  checkpoint,
  huggingface,
  normalization,
  npz,
  timm,
)
from vit_jax.weights.head import replace_head
from vit_jax.weights.transfer import adapt

PyTree = Any
# The first that matches counts; the last always matches.
FORMATS = {
  'big_vision': Format.of(big_vision),
  'npz': Format.of(npz),
  'huggingface': Format.of(huggingface),
  'timm': Format.of(timm),
  'checkpoint': Format.of(checkpoint),
}


def format_of(path: str) -> tuple[Format, str]:
  """The format of a path, and the path without the format's name.

  Args:
    path: alone, or after the name of a format: 'huggingface:DIR', or of a
      module of your own, 'my_lab.my_format:PATH'.

  Raises:
    UserError: a module is named and there is none, or it is no format.
  """
  name, _, rest = path.partition(':')
  if name in FORMATS and rest:
    return FORMATS[name], rest
  named = re.match(r'([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+):(?!//)(.+)', path)
  if named is None:
    return next(each for each in FORMATS.values() if each.matches(path)), path
  try:
    module = importlib.import_module(named[1])
  except ModuleNotFoundError as error:
    raise UserError(
      f'{path} names the format {named[1]}, and {error.name!r} cannot be '
      'imported; give MODULE:PATH with a module on the Python path, or a path '
      'alone.'
    ) from error
  missing = [name for name in Format._fields if not hasattr(module, name)]
  if missing:
    raise UserError(
      f'{named[1]} is no format of weights: it lacks {", ".join(missing)}; see '
      'vit_jax.weights.contract.Format.'
    )
  return Format.of(module), named[2]


def find(path: str, weights: str = 'params') -> Pretrained:
  """Looks at weights without loading them.

  Args:
    path: of any format.
    weights: which of a checkpoint, see `Pretrained.chosen`.

  Raises:
    UserError: there is nothing there that can be loaded, or no such weights.
  """
  form, place = format_of(path)
  return _checked(form.load(place).chosen(weights))


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes weights in the format of the path.

  Raises:
    UserError: the format cannot hold them, or cannot be written.
  """
  form, place = format_of(path)
  form.save(place, params, about)


def _checked(source: Pretrained) -> Pretrained:
  """The same, refusing to load weights that are not finite numbers."""

  def checked(load: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
    def load_and_check(abstract: PyTree) -> Any:
      params = load(abstract)
      _check_finite(source.path, params)
      return params

    return load_and_check

  names = ('load', 'load_average', 'load_extra')
  loaders = {name: getattr(source, name) for name in names}
  return dataclasses.replace(
    source, **{name: checked(load) for name, load in loaders.items() if load}
  )


def _check_finite(path: str, params: PyTree) -> None:
  """Raises UserError for NaN and infinities, naming their leaves."""
  flat = tree.flatten(params)
  mesh = next(iter(flat.values())).sharding.mesh
  count = jax.jit(  # on the devices, where other processes have their part
    lambda flat: {k: jnp.sum(~jnp.isfinite(leaf)) for k, leaf in flat.items()},
    out_shardings=sharding.replicated(mesh),
  )
  bad = {key: n for key, n in jax.device_get(count(flat)).items() if n}
  if bad:
    shown = [f'{key} ({n} of {flat[key].size})' for key, n in bad.items()]
    more = f' and {len(bad) - 3} more leaves' if len(bad) > 3 else ''
    raise UserError(
      f'{path} holds weights that are NaN or infinite: '
      f'{", ".join(shown[:3])}{more}. Take another step or file.'
    )


def load_pretrained(
  path: str,
  *,
  weights: str = 'params',
  image_size: int | tuple[int, ...] | None = None,
  num_classes: int | None = None,
  dtype: str = 'float32',
  position_resize: str = 'aligned',
  mean: Sequence[float] | None = None,
  std: Sequence[float] | None = None,
  **model: Any,
) -> tuple[Any, PyTree]:
  """Loads a model and its parameters; the architecture follows from the file.

  Examples:
    >>> model, params = load_pretrained('B_16.npz', image_size=384)
    >>> logits = model.apply({'params': params}, images)  # in [-1, 1], NHWC

  Args:
    path: weights of any format (see `FORMATS`): an official or big_vision's
      .npz, timm's .safetensors or .pth, a Hugging Face directory, a workdir or
      a checkpoint step directory.
    weights: of a checkpoint, 'params', 'ema' for the average of parameters that
      was kept, or what its objective has besides ('teacher', of DINO).
    image_size: pixels, one number or (height, width); by default what the
      weights were made for. Position embeddings are interpolated to it.
    num_classes: outputs wanted; if the head has others it is replaced by a
      fresh one, by none for 0.
    dtype: of computation, 'float32' or 'bfloat16'.
    position_resize: 'aligned' or 'bicubic', see `positions.resize`.
    mean: of pixels in [0, 1] that the weights were trained with, where what is
      known of them is wrong; three numbers.
    std: their deviation, likewise.
    **model: other keys of the model's config section, such as gelu='exact'.

  Returns:
    The model and its parameters (float32); see `models.contract.Model`. Images
    are in [-1, 1] whatever the weights were trained with.

  Raises:
    UserError: the file cannot be loaded, or the size does not fit the patch.
  """
  source = find(path, weights).changed(dtype=dtype, **model)
  built = source.model()
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = source.backbone(source.load(source.abstract_params(mesh)))
  if mean is not None or std is not None:
    params = _normalized_otherwise(source, params, mean, std)
  size = source.image_size
  if image_size is not None:
    sides = (image_size,) if isinstance(image_size, int) else image_size
    size = square(sides)
    params = adapt(
      params, built, source.image_size, size, position_resize, mesh
    )
  if num_classes not in (None, source.about['num_classes']):
    about = source.about | {'num_classes': num_classes}
    built = dataclasses.replace(source, about=about).model()
    params = replace_head(params, built, size, mesh)
  return built, params


def _normalized_otherwise(
  source: Pretrained,
  params: PyTree,
  mean: Sequence[float] | None,
  std: Sequence[float] | None,
) -> PyTree:
  """Parameters for pixels of another mean and deviation than the format says.

  Raises:
    UserError: the format, which is ours or an official one, leaves no doubt.
  """
  if 'normalization' not in source.about:
    raise UserError(
      f'{source.path} takes pixels in [-1, 1]; mean and std are for weights of '
      'other projects.'
    )
  known = source.about['normalization']
  flat = tree.flatten(params)
  arrays = {path: np.asarray(leaf) for path, leaf in flat.items()}
  arrays = normalization.unfold(arrays, known['mean'], known['std'])
  arrays = normalization.fold(
    arrays, mean or known['mean'], std or known['std']
  )
  places = {path: leaf.sharding for path, leaf in flat.items()}
  return tree.unflatten(
    {
      path: jax.device_put(array, places[path])
      for path, array in arrays.items()
    }
  )
