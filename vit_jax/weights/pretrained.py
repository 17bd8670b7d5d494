"""Trained weights from anywhere and to anywhere; formats know the rest."""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.arrays import sharding, tree
from vit_jax.data.augment.transforms import square
from vit_jax.errors import UserError
from vit_jax.weights.contract import Format, Pretrained
from vit_jax.weights.formats import checkpoint, npz
from vit_jax.weights.transfer import adapt

PyTree = Any
# The first that matches counts; the last always matches.
FORMATS = (Format.of(npz), Format.of(checkpoint))


def format_of(path: str) -> tuple[Format, str]:
  """The format of a path, and the path without the format's name.

  Raises:
    UserError: a module is named and there is none, or it is no format.
  """
  named = re.match(r'([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+):(?!//)(.+)', path)
  if named is None:
    return next(each for each in FORMATS if each.matches(path)), path
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


def find(path: str) -> Pretrained:
  """Looks at weights without loading them.

  Raises:
    UserError: there is nothing there that can be loaded.
  """
  form, place = format_of(path)
  return _checked(form.load(place))


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
      if params is not None:
        _check_finite(source.path, params)
      return params

    return load_and_check

  return dataclasses.replace(
    source, load=checked(source.load), load_average=checked(source.load_average)
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
  image_size: int | tuple[int, ...] | None = None,
  dtype: str = 'float32',
  position_resize: str = 'aligned',
  **model: Any,
) -> tuple[Any, PyTree]:
  """Loads a model and its parameters; the architecture follows from the file.

  >>> model, params = load_pretrained('B_16.npz', image_size=384)
  >>> logits = model.apply({'params': params}, images)  # in [-1, 1], NHWC

  Args:
    path: an official .npz, a workdir or a checkpoint step directory.
    image_size: pixels, one number or (height, width); by default what the
      weights were made for. Position embeddings are interpolated to it.
    dtype: of computation, 'float32' or 'bfloat16'.
    position_resize: 'aligned' or 'bicubic', see `positions.resize`.
    **model: other keys of the model's config section, such as gelu='exact'.

  Returns:
    The model and its parameters (float32); see `models.contract.Model`.

  Raises:
    UserError: the file cannot be loaded, or the size does not fit the patch.
  """
  source = find(path)
  built = source.model(dtype=dtype, **model)
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = source.backbone(source.load(source.abstract_params(mesh)))
  if image_size is not None:
    sides = (image_size,) if isinstance(image_size, int) else image_size
    sizes = source.image_size, square(sides)
    params = adapt(params, built, *sizes, position_resize, mesh)
  return built, params
