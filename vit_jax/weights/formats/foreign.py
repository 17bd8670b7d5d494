"""Converts weights of other projects to `Pretrained`, and back."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import checkpoint
from vit_jax.arrays import tree
from vit_jax.arrays.host import place
from vit_jax.config import plugins, sections
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.models.layers import EPSILON
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats import normalization
from vit_jax.weights.formats.naming import Naming

log = logging.getLogger('vit_jax')
PyTree = Any
# Kind of GELU by its name in configs of other projects.
GELUS = {
  'gelu': 'exact',
  'gelu_new': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
  'gelu_tanh': 'tanh',
  'quick_gelu': 'quick',
}
KINDS_OF_GELU = ('exact', 'tanh', 'quick')


@dataclasses.dataclass(frozen=True)
class Unseen:
  """Properties of a model that cannot be derived from its arrays.

  Attributes:
    known_from: source of these values, for the log.
    gelu: 'exact', 'tanh' or 'quick'.
    epsilon: epsilon of LayerNorm; None to use `Described.epsilon`.
    mean: mean of each channel of pixels in [0, 1].
    std: standard deviation of each channel of pixels in [0, 1].
    preprocess: config section of the evaluation's transform.
    class_names: names in the order of the head's outputs; empty if unknown.
    image_size: (height, width) of the images that the model expects, pixels;
      None to use `Described.image_size`.
    position_resize: method by which the project interpolates positions, see
      `resizing.METHODS`; None to use `Described.position_resize`.
    assumed: whether the values are assumptions, which are logged as a warning.
  """

  known_from: str
  gelu: str = 'exact'
  epsilon: float | None = None
  mean: Sequence[float] = normalization.NONE[0]
  std: Sequence[float] = normalization.NONE[1]
  preprocess: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  class_names: Sequence[str] = ()
  image_size: tuple[int, int] | None = None
  position_resize: str | None = None
  assumed: bool = False


class Described(NamedTuple):
  """The properties of a model that are derived from the arrays of a file.

  Attributes:
    arrays: all arrays of the model, {name: array}.
    naming: names of the parameters in the other project.
    keys: keys of the config's `model` section; options only where they differ
      from the model's defaults.
    image_size: (height, width) of the images that the model expects, pixels.
    computed: values of `gelu` and `norm_eps` that the model uses unless its
      section sets others.
    epsilon: epsilon of LayerNorm in all published models of this kind; used if
      `Unseen.epsilon` is None.
    position_resize: method by which the library of the format interpolates
      positions, see `resizing.METHODS`; None for that of the model.
    other_patches: number of patches for which the positions fit as well, in a
      grid that is not square; None if the image size is certain.
  """

  arrays: dict[str, np.ndarray]
  naming: Naming
  keys: Mapping[str, Any]
  image_size: tuple[int, int]
  computed: Mapping[str, Any] = {'norm_eps': EPSILON}
  epsilon: float = EPSILON
  position_resize: str | None = 'bicubic_no_antialias'
  other_patches: int | None = None


def gelu(path: str, name: str) -> str:
  """Returns the kind of GELU for an activation of another project.

  Args:
    path: path of the weights, for messages.
    name: name in the config of the other project, a key of `GELUS`.

  Raises:
    UserError: the activation is not supported.
  """
  if name not in GELUS:
    raise UserError(
      f'{path} uses the activation {name!r}; the model vit supports '
      f'{", ".join(GELUS)}.'
    )
  return GELUS[name]


def pretrained(path: str, described: Described, unseen: Unseen) -> Pretrained:
  """Returns weights that are stored with the names of another project.

  Args:
    path: path of the weights, for messages.
    described: properties that are derived from the arrays.
    unseen: other properties, which are logged.

  Raises:
    UserError: parameters are missing, unknown, or have a wrong shape or dtype;
      or the model of this package does not support an option.
  """
  arrays, naming = described.arrays, described.naming
  image_size = unseen.image_size or described.image_size
  if unseen.epsilon is None:
    unseen = dataclasses.replace(unseen, epsilon=described.epsilon)
  naming_lib.check_floats(path, arrays)
  actual = {name: array.shape for name, array in arrays.items()}
  head = naming.part('head/kernel')
  assert head is not None
  outputs = actual.get(head.name) or (0,)
  num_classes = outputs[0 if naming.torch else -1]
  about = {
    'format': checkpoint.FORMAT,
    'model': _section(path, described, unseen),
    'objective': {'name': 'supervised'},
    'num_classes': num_classes,
    'image_size': list(image_size),
    'preprocess': dict(unseen.preprocess),
    'class_names': class_names(path, unseen.class_names, num_classes),
    'normalization': {'mean': list(unseen.mean), 'std': list(unseen.std)},
    'position_resize': unseen.position_resize or described.position_resize,
    'other_patches': described.other_patches,
  }

  def checked_shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    expected = {k: v.shape for k, v in tree.flatten(params).items()}
    naming_lib.check(path, actual, naming_lib.shapes(expected, naming))
    return expected

  def put(abstract: PyTree) -> PyTree:
    flat = naming_lib.native(arrays, checked_shapes(abstract), naming)
    flat = normalization.fold(flat, unseen.mean, unseen.std)
    return jax.tree.map(place, tree.unflatten(flat), abstract)

  source = Pretrained(path, about, put)
  # Shapes are compared here, and not only in `put`, so that an error is raised
  # before anything is allocated on a device.
  checked_shapes(abstract_params(source.model(), image_size))
  _log(path, unseen)
  return source


def shape(
  path: str, arrays: Mapping[str, np.ndarray], name: str, rank: int, kind: str
) -> tuple[int, ...]:
  """Checks and returns the shape of an array that all models of a kind have.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.
    name: name of the array.
    rank: number of its dimensions.
    kind: description of the models, for messages.

  Raises:
    UserError: the array is missing, has another rank, or is empty.
  """
  actual = arrays[name].shape if name in arrays else None
  if actual is None or len(actual) != rank or 0 in actual:
    shown = 'it is missing' if actual is None else f'it is {list(actual)}'
    raise UserError(
      f'{path} does not contain {kind}: {name} must have {rank} dimensions, '
      f'none of them 0, but {shown}; the file has '
      f'{", ".join(sorted(arrays)[:3])} …'
    )
  return actual


def class_names(path: str, names: Sequence[str], num_classes: int) -> list[str]:
  """Returns a name for each output of the head.

  If the given names are empty, or their number is not the number of outputs,
  the names are 'class 0', 'class 1' and so on.

  Args:
    path: path of the weights, for messages.
    names: names that belong to the weights; empty if unknown.
    num_classes: number of outputs, 0 without a head.
  """
  if names and num_classes and len(names) != num_classes:
    log.warning(
      '%s: left out its %d class names, because its head has %d outputs',
      path,
      len(names),
      num_classes,
    )
    names = ()
  if not names or not num_classes:
    return [f'class {i}' for i in range(num_classes)]
  return list(names)


def _section(path: str, described: Described, unseen: Unseen) -> dict[str, Any]:
  """Returns the config section of the model.

  Raises:
    UserError: the model does not have one of the options.
  """
  options = {'gelu': unseen.gelu, 'norm_eps': unseen.epsilon}
  options = {k: v for k, v in options.items() if v != described.computed.get(k)}
  section = {'name': 'vit', 'dtype': 'float32', **options, **described.keys}
  allowed = {'name', *plugins.keys(sections.constructor('model', section))}
  unknown = {k: v for k, v in section.items() if k not in allowed}
  if unknown:
    shown = ', '.join(f'{key}={value}' for key, value in unknown.items())
    raise UserError(
      f'{path} contains a model with {shown}; the model {section["name"]} does '
      'not support this.'
    )
  return section


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


def _log(path: str, unseen: Unseen) -> None:
  log.log(
    logging.WARNING if unseen.assumed else logging.INFO,
    '%s: settings that its arrays do not determine are those of %s: gelu %s, '
    'LayerNorm ε %g, mean %s, std %s, preprocess %s; override them by '
    'load_pretrained(…, gelu=…, mean=…, std=…) and --config.preprocess.KEY=…',
    path,
    unseen.known_from,
    unseen.gelu,
    unseen.epsilon,
    tuple(unseen.mean),
    tuple(unseen.std),
    dict(unseen.preprocess) or '{}',
  )


def exported(
  params: PyTree, about: dict[str, Any], naming: Naming
) -> dict[str, np.ndarray]:
  """Returns the parameters of a model with the names of another project.

  Args:
    params: parameters of the objective that `about` specifies.
    about: description of the weights, see `Pretrained.about`; its mean and
      standard deviation are unfolded from the patch embedding.
    naming: names in the other project.

  Raises:
    UserError: some parameters do not have a name in the other project.
  """
  source = Pretrained('', about, lambda abstract: None)
  model = source.model()
  check_positions(model, ('learned',))
  backbone = source.backbone(params)
  flat = {k: np.asarray(v) for k, v in tree.flatten(backbone).items()}
  flat = normalization.symmetric(flat, model.normalization)
  mean, std = mean_and_std(about)
  flat = normalization.unfold(flat, mean, std)
  return dict(naming_lib.export(flat, naming))


def check_positions(model: Any, known: tuple[str, ...]) -> None:
  """Checks that a format supports the kind of positions of a model.

  Args:
    model: model whose parameters are written.
    known: kinds that the format supports.

  Raises:
    UserError: the model has positions of another kind.
  """
  position = getattr(model, 'position', 'learned')
  if position not in known:
    raise UserError(
      f'this format has positions of the kind {" or ".join(known)}, but this '
      f'model has {position!r}, which a reader could not derive from its '
      'parameters: write a directory instead.'
    )


def warn_of_defaults(path: str, model: Any) -> None:
  """Warns if other programs would use other constants than a model.

  Args:
    path: path of the file that is written.
    model: model whose GELU and epsilon are compared with those of the official
      JAX models, which other programs use because the file does not contain
      any.
  """
  defaults = {'gelu': 'tanh', 'norm_eps': EPSILON}
  other = [
    f'{key}={getattr(model, key)!r} (and not {value!r})'
    for key, value in defaults.items()
    if getattr(model, key, value) != value
  ]
  if other:
    log.warning(
      '%s cannot contain the settings of this model; other programs that read '
      'it need %s',
      path,
      ' and '.join(other),
    )


def mean_and_std(about: dict[str, Any]) -> tuple[list[float], list[float]]:
  """Returns the mean and std of pixels in [0, 1] that weights expect."""
  mean, std = normalization.NONE
  values = about.get('normalization', {'mean': mean, 'std': std})
  return list(values['mean']), list(values['std'])
