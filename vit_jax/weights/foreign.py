"""Converts weights of other projects to `Pretrained`, and back.

The module of a format derives `ParsedWeights` from the arrays of a file and
from the settings next to them; everything else is the same for all formats.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.arrays import tree
from vit_jax.arrays.sharding import place
from vit_jax.config import completion, schema
from vit_jax.config.keys import square
from vit_jax.errors import UserError
from vit_jax.models.contract import Statistics, is_symmetric, symmetric
from vit_jax.models.layers import EPSILON
from vit_jax.weights import metadata as metadata_lib
from vit_jax.weights import names as names_lib
from vit_jax.weights import patch_embedding
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import NameMap

log = logging.getLogger('vit_jax')
_SUPPORTED = (
  'Supported are ViT, hybrids, BiT and Swin: use weights of these, and leave '
  'out keys of the model that differ.'
)
PyTree = Any


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
    noted: keys of the model's section in notes of this package; they take
      precedence over `model`.
    own_pixels: whether the pixels are known to be in [-1, 1], so that users
      cannot override mean and std.
  """

  arrays: dict[str, np.ndarray]
  names: NameMap
  model: Mapping[str, Any]
  metadata: ModelMetadata
  defaults: Mapping[str, Any] = {'norm_eps': EPSILON}
  objective: Mapping[str, Any] = {'name': 'supervised'}
  noted: Mapping[str, Any] = {}
  own_pixels: bool = False


def imported(path: str, parsed: ParsedWeights) -> Pretrained:
  """Returns weights that are stored with the names of another project.

  The properties that their arrays do not determine are logged.

  Args:
    path: path of the weights, for messages.
    parsed: arrays and properties.

  Raises:
    UserError: parameters are missing, unknown, or have a wrong shape or dtype;
      or the model of this package does not support an option.
  """
  source, metadata = described(path, parsed), parsed.metadata
  # Shapes are compared here, and not only in `load`, so that an error is raised
  # before anything is allocated on a device.
  description = source.description
  options = {k: v for k, v in description.model.items() if k != 'name'}
  try:
    _ = description.with_model(**options).built_model  # which checks the keys
  except UserError as error:
    raise UserError(
      f'{path} contains a model that is not supported: {error}'
    ) from error
  shapes = _shapes(parsed, source.abstract_params())
  tree.check_shapes(path, *shapes, _SUPPORTED, most=None)
  log.log(
    logging.WARNING if metadata.assumed else logging.INFO,
    '%s: settings that its arrays do not determine are those of %s: gelu %s, '
    'LayerNorm ε %g, mean %s, std %s, preprocess %s; override them by '
    'load_pretrained(…, gelu=…, mean=…, std=…) and --config.preprocess.KEY=…',
    path,
    metadata.known_from,
    metadata.gelu,
    metadata.norm_eps,
    *map(list, description.statistics or symmetric(source.model().channels)),
    description.preprocess or '{}',
  )
  return source


def described(path: str, parsed: ParsedWeights) -> Pretrained:
  """Describes the weights of `imported`; checks shapes when they are loaded."""
  arrays, names, metadata = parsed.arrays, parsed.names, parsed.metadata
  channels = parsed.model.get('channels', patch_embedding.RGB)
  statistics = _statistics(path, metadata, channels)
  preprocess = dict(metadata.preprocess)
  if channels != patch_embedding.RGB:
    preprocess['channels'] = channels
  names_lib.check_floats(path, arrays)
  num_classes = _num_classes(arrays, names)
  class_names = list(metadata.class_names)
  if len(class_names) != num_classes:
    if class_names and num_classes:
      log.warning(
        '%s: left out its %d class names, because its head has %d outputs',
        path,
        len(class_names),
        num_classes,
      )
    class_names = [f'class {i}' for i in range(num_classes)]
  description = Description(
    model=_section(path, parsed),
    objective=dict(parsed.objective),
    num_classes=num_classes,
    image_size=square(metadata.image_size),
    preprocess=preprocess,
    class_names=tuple(class_names),
    statistics=None if parsed.own_pixels else statistics,
    position_resize=metadata.position_resize,
    other_patches=metadata.other_patches,
  )

  def put(abstract: PyTree) -> PyTree:
    shapes = _shapes(parsed, abstract)
    tree.check_shapes(path, *shapes, _SUPPORTED, most=None)
    flat = names.native(arrays, _by_path(abstract))
    flat = patch_embedding.converted(flat, statistics)
    paths = tree.flatten(abstract)
    flat = {path: flat[path.removeprefix('model/')] for path in paths}
    return jax.tree.map(place, tree.unflatten(flat), abstract)

  return Pretrained(path, description, put)


def _num_classes(arrays: Mapping[str, np.ndarray], names: NameMap) -> int:
  """Returns the number of outputs of the head in a file; 0 for no head."""
  entry = names.find('head/kernel')
  assert entry is not None  # every table contains it
  kernel = arrays.get(entry.name)
  if kernel is None or kernel.ndim == 0:  # a number is reported with all shapes
    return 0
  return kernel.shape[0 if names.torch else -1]


def _shapes(
  parsed: ParsedWeights, params: PyTree
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
  """Returns {name: shape} of the arrays of a file, and of the required ones.

  Args:
    parsed: arrays of the file.
    params: shapes of the objective's parameters.
  """
  actual = {name: array.shape for name, array in parsed.arrays.items()}
  return actual, parsed.names.shapes(_by_path(params))


def _by_path(params: PyTree) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of an objective's parameters by the path in the model.

  Names do not depend on whether the objective has other parameters.
  """
  shapes = tree.shapes(params)
  return {path.removeprefix('model/'): shapes[path] for path in shapes}


def _statistics(
  path: str, metadata: ModelMetadata, channels: int
) -> Statistics:
  """Returns the mean and std of each channel.

  A single number is that of all channels. Settings for RGB do not apply to
  other images, which are then expected in [-1, 1].

  Raises:
    UserError: the settings of RGB images do not have three numbers.
  """
  mean, std = tuple(metadata.mean), tuple(metadata.std)
  if len(mean) == 1:
    mean *= channels
  if len(std) == 1:
    std *= channels
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


def _section(path: str, parsed: ParsedWeights) -> dict[str, Any]:
  """Returns the config section of the model, without defaults.

  Raises:
    UserError: a key in notes does not exist, or its value has another type.
  """
  metadata = parsed.metadata
  options = {'gelu': metadata.gelu, 'norm_eps': metadata.norm_eps}
  options = {k: v for k, v in options.items() if v != parsed.defaults.get(k)}
  section = {'name': 'vit', **parsed.model}
  keys = schema.config_keys(schema.constructor('model', section))
  for key, value in parsed.noted.items():
    if key not in keys or schema.nested(keys[key].annotation):
      raise completion.unknown_key(f'{path}: model.', key, keys)
    kind = keys[key].annotation
    section[key] = completion.typed(f'{path}: model.{key}', value, kind)
  patch_size = section.get('patch_size', 1)
  if any(side % patch_size for side in metadata.image_size):
    section['remainder'] = 'drop'
  without_defaults = {
    key: value
    for key, value in section.items()
    if key not in keys or value != keys[key].default
  }
  return {'dtype': 'float32', **options, **without_defaults}


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


def native_params(
  params: PyTree, description: Description
) -> dict[str, np.ndarray]:
  """Returns the parameters of a model by path, for pixels in [-1, 1].

  Args:
    params: parameters of the objective that is described.
    description: what the weights are.

  Raises:
    UserError: the normalization of the model's pixels cannot be converted.
  """
  flat = tree.flatten(description.built_objective.backbone(params))
  arrays = {path: np.asarray(leaf) for path, leaf in flat.items()}
  old = description.built_model.normalization
  return patch_embedding.converted(arrays, old)


def exported(
  params: PyTree, description: Description, names: NameMap
) -> dict[str, np.ndarray]:
  """Returns the parameters of a model with the names of another project.

  The mean and std of the project's pixels are unfolded from the patch
  embedding.

  Args:
    params: parameters of the objective that is described.
    description: what the weights are.
    names: names in the other project.

  Raises:
    UserError: some parameters do not have a name in the other project.
  """
  flat = native_params(params, description)
  statistics = description.statistics or patch_embedding.NONE
  flat = patch_embedding.converted(flat, patch_embedding.NONE, statistics)
  return dict(names.export(flat))


def determined(description: Description) -> dict[str, Any]:
  """Returns the properties of a model that its weights determine."""
  model = description.built_model
  return {
    'name': type(model).__module__,
    'num_classes': model.num_classes,
    'image_size': description.image_size,
    **model.architecture,
    **model.options,
  }


def check_same(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
  """Checks that a file opens as the model that is written.

  Args:
    expected: properties of the model that is written, by name.
    found: properties of the model that the file opens as.

  Raises:
    UserError: some differ; the message contains all of them.
  """
  differing = [
    f'{key}={expected.get(key)!r} (it would open with {found.get(key)!r})'
    for key in {**expected, **found}
    if expected.get(key) != found.get(key)
  ]
  if differing:
    raise names_lib.not_writable(', '.join(differing))


def check_opens(
  path: str,
  description: Description,
  parsed: ParsedWeights,
  equivalent: Mapping[str, Any] = {},
) -> None:
  """Checks before weights are written that they will open as the same model.

  Args:
    path: path to write, for messages.
    description: what the weights are.
    parsed: result of parsing what will be written.
    equivalent: properties that the format converts without changing the
      function of the model, with their values; see `determined`.

  Raises:
    UserError: they would open as another model, or not at all.
  """
  source = described(path, parsed)
  expected = {**determined(description), **equivalent}
  check_same(expected, determined(source.description))
  check_same(*_shapes(parsed, source.abstract_params()))


def noted(
  path: str,
  description: Description,
  parse: Callable[[Mapping[str, Any]], ParsedWeights],
  always: tuple[str, ...] = (),
) -> dict[str, Any]:
  """Returns notes with which weights will open as the same model.

  Settings that other programs have to be given are logged.

  Args:
    path: path to write, for messages.
    description: what the weights are.
    parse: function from the result of `metadata.read_notes` to what will be
      parsed.
    always: keys of the model that are stored although arrays may suggest them.

  Raises:
    UserError: they would open as another model, or not at all.
  """
  model = description.built_model
  # What programs open that do not read the notes
  parsed = parse({'image_size': description.image_size})
  plain = determined(described(path, parsed).description)
  differing = {
    key: value
    for key, value in (model.architecture | model.options).items()
    if plain.get(key) != value
  }
  if differing:
    log.warning(
      '%s cannot contain settings of this model; other programs that read it '
      'assume %s instead of %s',
      path,
      {key: plain.get(key) for key in differing},
      differing,
    )
  differing |= {key: getattr(model, key) for key in always}
  notes = metadata_lib.notes(description) | {'model_args': differing}
  values = metadata_lib.read_notes(path, json.loads(json.dumps(notes)))
  check_opens(path, description, parse(values))
  return notes
