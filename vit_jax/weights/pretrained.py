"""Loads and saves trained weights in any format."""

import dataclasses
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from vit_jax.arrays import sharding, tree
from vit_jax.config.keys import square
from vit_jax.data.images.channels import Pixels
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.objectives import contrastive
from vit_jax.objectives.mixing import largest
from vit_jax.weights import adapters, download
from vit_jax.weights.contract import Format, Pretrained, SeveralModels
from vit_jax.weights.description import Description
from vit_jax.weights.formats import (
  huggingface,
  native,
  npz,
  peft,
  tensors,
  timm,
)
from vit_jax.weights.names import not_writable
from vit_jax.weights.resizing import adapt, renormalized, replace_head, resized

PyTree = Any


def _load_tensors(
  path: str, config: dict[str, Any]
) -> Pretrained | SeveralModels:
  """Describes PyTorch weights, whose names depend on the config next to them.

  Args:
    path: path of a file or a directory.
    config: result of `tensors.read_config`.
  """
  is_timm = config.get('model_type', 'timm_wrapper') == 'timm_wrapper'
  form = timm if is_timm else huggingface
  return form.load(path, config)


def _load_peft(path: str, config: dict[str, Any] | None) -> Pretrained:
  """Describes an adapter of PEFT, together with its frozen model."""
  return peft.load(path, config, find)


def _no_path(path: str) -> None:
  """Matches no path, because the format is selected by its name."""


# The first format that matches a path is used.
FORMATS = {
  'npz': Format.of(npz),
  'peft': Format(peft.matches, _load_peft, peft.save, adapters=True),
  'tensors': Format(tensors.read_config, _load_tensors, timm.save),
  'checkpoint': Format.of(native),  # matches all other paths
  'big_vision': Format(_no_path, npz.load, npz.save_big_vision),
  'huggingface': Format(_no_path, huggingface.load, huggingface.save),
  'timm': Format(_no_path, timm.load, timm.save),
}


class LoadedModel(tuple[Any, PyTree]):
  """A model and its parameters, with the preprocessing that they need.

  It can be unpacked: `model, params = load_pretrained(path)`.

  Attributes:
    model: model, see `models.contract.Model`.
    params: parameters, float32.
    class_names: name of each output of the head.
    image_size: (height, width) of the images, pixels.
  """

  model: Any
  params: PyTree
  class_names: list[str]
  image_size: tuple[int, int]
  _source: Description
  _loaded: PyTree

  def __new__(
    cls, model: Any, params: PyTree, source: Description, loaded: PyTree
  ):
    """Creates the pair.

    Args:
      model: the model.
      params: its parameters.
      source: description of the weights, for the image size of `params`.
      loaded: parameters of the objective of the weights.
    """
    pair = super().__new__(cls, (model, params))
    pair.model, pair.params = model, params
    pair.class_names = list(source.class_names)
    pair.image_size = source.image_size
    pair._source, pair._loaded = source, loaded
    return pair

  def preprocess(
    self, image: bytes | Pixels
  ) -> Float[np.ndarray, 'height width c']:
    """Returns an image as the model expects it, in [-1, 1].

    The image is resized and cropped as in the evaluation of the weights. To
    create a batch, stack several results.

    Args:
      image: content of an image file, or pixels (RGB, or the channels and bits
        that the weights were trained with).

    Raises:
      DecodeError: the bytes are not an image that can be read.
    """
    pixels = self._source.transform().pixels(image)
    half = largest(pixels.dtype) / 2
    return np.asarray(pixels, np.float32) / half - 1

  def text_logits(
    self, images: Float[np.ndarray, 'n y x c'], texts: Sequence[str]
  ) -> Float[np.ndarray, 'n k']:
    """Returns the logits of texts for images, of CLIP, SigLIP or LiT.

    Args:
      images: images in [-1, 1], as `preprocess` returns them.
      texts: texts to compare them with.

    Raises:
      UserError: the weights have no text tower, or no tokenizer.
    """
    objective = self._source.built_objective
    params = objective.start_params(self._loaded, self.params)
    rows = contrastive.tokens_of(objective, self._source.transform(), texts)
    predict = jax.jit(objective.predict, static_argnames='want')
    given = predict(params, {'tokens': rows}, want=('text',))
    # `predict` expects pixels from 0 to 255.
    batch = {'image': (images + 1) * np.float32(127.5), **given}
    return np.asarray(predict(params, batch)['logits'])


def format_of(path: str) -> tuple[Format, str, Any]:
  """Returns the format of a path.

  Args:
    path: path, optionally after the name of a format ('huggingface:DIR') or of
      a module of your own ('my_lab.my_format:PATH').

  Returns:
    The format, the path without its name, and the result of `Format.matches`
    (None for a named format).

  Raises:
    UserError: the module cannot be imported or does not define a format.
  """
  name, _, rest = path.partition(':')
  if name in FORMATS and rest:
    return FORMATS[name], rest, None
  named = re.match(r'([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+):(?!//)(.+)', path)
  if named is None:
    return next(
      (form, path, matched)
      for form in FORMATS.values()
      if (matched := form.matches(path)) is not None
    )
  try:
    module = importlib.import_module(named[1])
    return Format.of(module), named[2], None
  except (ModuleNotFoundError, AttributeError) as error:
    raise UserError(
      f'the format {named[1]} of {path} cannot be used: {error}. Give a module '
      'on the Python path that defines matches, load and save.'
    ) from error


def find(
  path: str,
  weights: str = 'params',
  image_size: tuple[int, int] | None = None,
  merge: bool = True,
) -> Pretrained:
  """Describes weights without loading them.

  Args:
    path: path of any format, see `format_of`, or an address, see `download`.
    weights: set of weights of a checkpoint, see `Pretrained.chosen`.
    image_size: (height, width) of the images, pixels, see `resizing.resized`;
      by default that of the weights.
    merge: whether LoRA is merged with its frozen weights. If not, the result
      for a run with LoRA is that of `adapters.unmerged`.

  Raises:
    UserError: the path cannot be loaded, or does not contain that set of
      weights.
    DownloadError: a download failed.
  """
  form, local_path, matched = format_of(download.local_copy(path))
  found = form.load(local_path, matched)
  if isinstance(found, Pretrained):
    found = adapters.unmerged(found, find)
    found = adapters.merged(found) if merge else found
  source = _checked(found.chosen(weights))
  return source if image_size is None else resized(source, image_size)


def save(path: str, params: PyTree, description: Description) -> None:
  """Writes weights in the format of a path.

  Args:
    path: path of any format, see `format_of`.
    params: parameters of the objective that is described.
    description: what the weights are.

  Raises:
    UserError: the weights cannot be stored in this format, or cannot be
      written.
  """
  form, local_path, _ = format_of(path)
  if form in FORMATS.values() and form is not FORMATS['checkpoint']:
    channels = description.model.get('channels', 3)
    bits = description.preprocess.get('bits', 8)
    if (channels, bits) != (3, 8):
      raise not_writable(
        f'images other than RGB of 8 bits, here {channels} channel(s) of '
        f'{bits} bits'
      )
  try:
    form.save(local_path, params, description)
  except (OSError, ValueError) as error:
    # TensorStore raises ValueError for errors of the file system.
    if isinstance(error, ValueError) and paths.error_number(error) is None:
      raise
    reason = paths.reason(error)
    raise UserError(f'{local_path} cannot be written: {reason}.') from error


def _checked(source: Pretrained) -> Pretrained:
  """Returns the same weights, with loaders that check for NaN and infinity."""

  def checked(load: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
    def load_and_check(abstract: PyTree) -> Any:
      params = load(abstract)
      check_finite(source.path, params)
      return params

    return load_and_check

  names = ('load', 'load_average', 'load_extra')
  loaders = {name: getattr(source, name) for name in names}
  return dataclasses.replace(
    source, **{name: checked(load) for name, load in loaders.items() if load}
  )


def check_finite(path: str, params: PyTree) -> None:
  """Checks that parameters are finite.

  Args:
    path: path of the weights, for messages.
    params: parameters on a mesh.

  Raises:
    UserError: some are NaN or infinite; the message lists their leaves.
  """
  flat = tree.flatten(params)
  mesh = next(iter(flat.values())).sharding.mesh
  # The devices count the values, because other processes may hold parts of a
  # leaf.
  count = jax.jit(
    lambda flat: {k: jnp.sum(~jnp.isfinite(leaf)) for k, leaf in flat.items()},
    out_shardings=sharding.replicated(mesh),
  )
  bad = {key: n for key, n in jax.device_get(count(flat)).items() if n}
  if bad:
    shown = [f'{key} ({n} of {flat[key].size})' for key, n in bad.items()]
    more = f' and {len(bad) - 3} more leaves' if len(bad) > 3 else ''
    raise UserError(
      f'{path} contains weights that are NaN or infinite: '
      f'{", ".join(shown[:3])}{more}. Use another step or file.'
    )


@jax.enable_x64(False)  # parameters are float32 in programs of 64 bits, too
def load_pretrained(
  path: str,
  *,
  weights: str = 'params',
  image_size: int | tuple[int, ...] | None = None,
  num_classes: int | None = None,
  dtype: str = 'float32',
  position_resize: str | None = None,
  mean: Sequence[float] | None = None,
  std: Sequence[float] | None = None,
  **model: Any,
) -> LoadedModel:
  """Loads a model and its parameters; the file determines the architecture.

  Examples:
    >>> model, params = load_pretrained('B_16.npz', image_size=384)
    >>> logits = model.apply({'params': params}, images)  # in [-1, 1], NHWC

    With the preprocessing and class names of the weights:

    >>> loaded = load_pretrained('runs/quickstart')
    >>> image = loaded.preprocess(open('digit.png', 'rb').read())
    >>> logits = loaded.model.apply({'params': loaded.params}, image[None])
    >>> loaded.class_names[logits[0].argmax()]

  Args:
    path: path of weights in any format (see `FORMATS`): an official or
      big_vision's .npz, timm's .safetensors or .pth (also
      timm:ARCHITECTURE:PATH), a Hugging Face directory, a workdir or a
      checkpoint step directory.
    weights: set of weights of a checkpoint: 'params', 'ema' for the average of
      the parameters, or a name that its objective defines ('teacher' of DINO).
    image_size: pixels, one number or (height, width); by default, the size of
      the weights. Position embeddings are interpolated to another size.
    num_classes: number of outputs. A head with another number is replaced by a
      newly initialized one, or removed for 0.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.
    position_resize: method of interpolation, see `positions.METHODS`; None for
      that of the project that the weights are from.
    mean: mean of pixels in [0, 1] in the training of the weights, a number for
      each channel; for files whose settings are missing or wrong.
    std: standard deviation of the same pixels, for each channel.
    **model: other keys of the model's config section, such as gelu='exact'.

  Returns:
    Model and parameters (float32), which can be unpacked, with preprocessing
    and class names. The model expects images in [-1, 1], even if the weights
    were trained with another range.

  Raises:
    UserError: the file cannot be loaded, or the image size does not fit.
  """
  source = find(path, weights).changed(dtype=dtype, **model)
  if mean is not None or std is not None:
    source = renormalized(source, mean, std)
  size = source.image_size
  if image_size is not None:
    sides = (image_size,) if isinstance(image_size, int) else image_size
    size = square(sides)
  built = source.model()
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  loaded = source.load(source.abstract_params(mesh))
  params = source.backbone(loaded)
  params = adapt(params, built, source, size, position_resize, mesh)
  description = dataclasses.replace(source.description, image_size=size)
  if num_classes not in (None, description.num_classes):
    names = tuple(f'class {i}' for i in range(num_classes))
    description = dataclasses.replace(
      description, num_classes=num_classes, class_names=names
    )
    built = description.built_model
    params = replace_head(params, built, size, mesh)
  return LoadedModel(built, params, description, loaded)
