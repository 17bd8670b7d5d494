"""Converts weights of other projects to `Pretrained`, and back.

The module of a format derives `ParsedWeights` from the arrays of a file and
from the settings next to them; everything else is the same for all formats.
"""

import logging
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.arrays import tree
from vit_jax.arrays.sharding import place
from vit_jax.checkpoint import FORMAT
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models.contract import (
  Statistics,
  is_symmetric,
  symmetric,
)
from vit_jax.models.layers import EPSILON
from vit_jax.weights import names as names_lib
from vit_jax.weights import patch_embedding
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import NameMap

log = logging.getLogger('vit_jax')
PyTree = Any


# Options of the ViT that few formats can contain
_RARE = ('rope', 'class_token', 'norm', 'post_norm', 'final_norm', 'qkv_bias')
_RARE += ('bias', 'map_heads', 'map_mlp_dim', 'map_prefix', 'rope_registers')


class ParsedWeights(NamedTuple):
  """The weights of a file of another project.

  Attributes:
    arrays: all arrays of the model, {foreign name: array}.
    names: names of the parameters in the other project.
    model: keys of the config's `model` section, with or without defaults.
    metadata: properties that the arrays do not determine.
    defaults: values of `gelu` and `norm_eps` that the model uses unless its
      section sets others.
    objective: section `objective` of the config. If its parameters are more
      than those of the model, the names of the others have the same paths.
  """

  arrays: dict[str, np.ndarray]
  names: NameMap
  model: Mapping[str, Any]
  metadata: ModelMetadata
  defaults: Mapping[str, Any] = {'norm_eps': EPSILON}
  objective: Mapping[str, Any] = {'name': 'supervised'}


def imported(path: str, parsed: ParsedWeights) -> Pretrained:
  """Returns weights that are stored with the names of another project.

  Args:
    path: path of the weights, for messages.
    parsed: arrays and properties, which are logged.

  Raises:
    UserError: parameters are missing, unknown, or have a wrong shape or dtype;
      or the model of this package does not support an option.
  """
  arrays, names, metadata = parsed.arrays, parsed.names, parsed.metadata
  channels = parsed.model.get('channels', patch_embedding.RGB)
  mean, std = statistics = _statistics(path, metadata, channels)
  preprocess = dict(metadata.preprocess)
  if channels != patch_embedding.RGB:
    preprocess['channels'] = channels
  names_lib.check_floats(path, arrays)
  actual = {name: array.shape for name, array in arrays.items()}
  head = names.find('head/kernel')
  assert head is not None
  num_classes = (actual.get(head.name) or (0,))[0 if names.torch else -1]
  names_of_classes = list(metadata.class_names)
  if len(names_of_classes) != num_classes:
    if names_of_classes and num_classes:
      log.warning(
        '%s: left out its %d class names, because its head has %d outputs',
        path,
        len(names_of_classes),
        num_classes,
      )
    names_of_classes = [f'class {i}' for i in range(num_classes)]
  about = {
    'format': FORMAT,
    'model': _section(parsed),
    'objective': dict(parsed.objective),
    'num_classes': num_classes,
    'image_size': list(metadata.image_size),
    'preprocess': preprocess,
    'class_names': names_of_classes,
    'normalization': {'mean': list(mean), 'std': list(std)},
    'position_resize': metadata.position_resize,
    'other_patches': metadata.other_patches,
  }

  def checked_shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    # Names do not depend on whether the objective has other parameters.
    expected = {
      path.removeprefix('model/'): leaf.shape
      for path, leaf in tree.flatten(params).items()
    }
    names_lib.check_shapes(path, actual, names.shapes(expected))
    return expected

  def put(abstract: PyTree) -> PyTree:
    flat = names.native(arrays, checked_shapes(abstract))
    flat = patch_embedding.converted(flat, statistics)
    paths = tree.flatten(abstract)
    flat = {path: flat[path.removeprefix('model/')] for path in paths}
    return jax.tree.map(place, tree.unflatten(flat), abstract)

  source = Pretrained(path, about, put)
  # Shapes are compared here, and not only in `put`, so that an error is raised
  # before anything is allocated on a device.
  options = {k: v for k, v in about['model'].items() if k != 'name'}
  try:
    source.model(**options)  # which checks the keys
  except UserError as error:
    raise UserError(
      f'{path} contains a model that is not supported: {error}'
    ) from error
  checked_shapes(source.abstract_params())
  log.log(
    logging.WARNING if metadata.assumed else logging.INFO,
    '%s: settings that its arrays do not determine are those of %s: gelu %s, '
    'LayerNorm ε %g, mean %s, std %s, preprocess %s; override them by '
    'load_pretrained(…, gelu=…, mean=…, std=…) and --config.preprocess.KEY=…',
    path,
    metadata.known_from,
    metadata.gelu,
    metadata.norm_eps,
    *statistics,
    preprocess or '{}',
  )
  return source


def _statistics(
  path: str, metadata: ModelMetadata, channels: int
) -> Statistics:
  """Returns the mean and std of each channel.

  A single number is that of all channels. Settings for RGB do not apply to
  other images, which are then expected in [-1, 1].

  Raises:
    UserError: the settings of RGB images do not have three numbers.
  """
  mean, std = (
    tuple(values) * (channels if len(values) == 1 else 1)
    for values in (metadata.mean, metadata.std)
  )
  if len(mean) == len(std) == channels:
    return mean, std
  if channels == patch_embedding.RGB:
    raise UserError(
      f'{path}: mean is {mean} and std is {std}; give a number for each of '
      f'its {channels} channels.'
    )
  if not is_symmetric((mean, std)):
    log.warning('%s: mean and std of its channels are unknown', path)
  return symmetric(channels)


def _section(parsed: ParsedWeights) -> dict[str, Any]:
  """Returns the config section of the model, without defaults."""
  options = {key: getattr(parsed.metadata, key) for key in ('gelu', 'norm_eps')}
  options = {k: v for k, v in options.items() if v != parsed.defaults.get(k)}
  section = {'name': 'vit', **parsed.model}
  keys = schema.config_keys(schema.constructor('model', section))
  section = {
    key: value
    for key, value in section.items()
    if key not in keys or value != keys[key].default
  }
  return {'dtype': 'float32', **options, **section}


def without_class_position(
  arrays: dict[str, np.ndarray], cls: str, table: str
) -> dict[str, np.ndarray]:
  """Adds the class token's position to the token, and removes the position.

  Args:
    arrays: arrays of a model, {name: array}.
    cls: name of the class token `[1, 1, d]`.
    table: name of the position embedding `[1, 1 + patches, d]`.
  """
  first, patches = np.split(arrays[table], [1], axis=1)
  return arrays | {cls: arrays[cls] + first, table: patches}


def opened_model(about: dict[str, Any]) -> Any:
  """Builds the model of a description, see `Pretrained.about`."""
  return Pretrained('', about, lambda abstract: None).model()


def native_params(
  params: PyTree,
  about: dict[str, Any],
  positions: tuple[str, ...],
  supported: Container[str] = (),
) -> dict[str, np.ndarray]:
  """Returns the parameters of a model by path, for pixels as in its project.

  Args:
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`.
    positions: kinds of positions that the format supports.
    supported: options in `_RARE` that it supports.

  Raises:
    UserError: the model has positions of another kind or an option that the
      format does not support, or its normalization of pixels cannot be
      converted.
  """
  source = Pretrained('', about, lambda abstract: None)
  model = source.model()
  position = getattr(model, 'position', 'learned')
  if position not in positions:
    raise names_lib.not_writable(
      f'positions other than {" or ".join(positions)}, here {position!r}'
    )
  section = {'name': 'vit', **about['model']}
  keys = schema.config_keys(schema.constructor('model', section))
  for key in [key for key in _RARE if key in keys and key not in supported]:
    value = getattr(model, key)
    if value != keys[key].default:
      raise names_lib.not_writable(f'model.{key}={value!r}')
  flat = tree.flatten(source.backbone(params))
  arrays = {path: np.asarray(leaf) for path, leaf in flat.items()}
  return patch_embedding.converted(arrays, model.normalization)


def exported(
  params: PyTree,
  about: dict[str, Any],
  names: NameMap,
  positions: tuple[str, ...] = ('learned',),
  supported: Container[str] = (),
) -> dict[str, np.ndarray]:
  """Returns the parameters of a model with the names of another project.

  The mean and std of the project's pixels are unfolded from the patch
  embedding.

  Args:
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`.
    names: names in the other project.
    positions: see `native_params`.
    supported: see `native_params`.

  Raises:
    UserError: some parameters do not have a name in the other project.
  """
  flat = native_params(params, about, positions, supported)
  metadata = ModelMetadata.of(None, about)
  statistics = metadata.mean, metadata.std
  flat = patch_embedding.converted(flat, patch_embedding.NONE, statistics)
  return dict(names.export(flat))
