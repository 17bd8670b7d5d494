"""Weights of another project, as `weights.contract.Pretrained` and back."""

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
from vit_jax.models.layers.norm import EPSILON
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats import normalization
from vit_jax.weights.formats.naming import Naming

log = logging.getLogger('vit_jax')
PyTree = Any
# What files of many kinds call the two forms of GELU.
GELUS = {
  'gelu': 'exact',
  'gelu_new': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
  'gelu_tanh': 'tanh',
  'quick_gelu': 'quick',
}


@dataclasses.dataclass(frozen=True)
class Unseen:
  """What no array shows.

  Attributes:
    known_from: where this was learned, for people.
    gelu: 'exact', 'tanh' or 'quick'.
    epsilon: of LayerNorm; None for `Described.epsilon`.
    mean: of each channel of pixels in [0, 1].
    std: their deviation.
    preprocess: config section of the evaluation's transform.
    class_names: in the order of the head's outputs; empty if they are unknown.
  """

  known_from: str
  gelu: str = 'exact'
  epsilon: float | None = None
  mean: Sequence[float] = normalization.NONE[0]
  std: Sequence[float] = normalization.NONE[1]
  preprocess: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  class_names: Sequence[str] = ()


class Described(NamedTuple):
  """What a file shows of its model.

  Attributes:
    arrays: {name: array}, all that the file has for the model.
    naming: of the project.
    keys: of the config's `model` section; options only where they are not the
      model's defaults.
    image_size: (height, width) that the weights are made for, pixels.
    computed: what the model computes by unless its section says otherwise, of
      `gelu` and `norm_eps`.
    epsilon: of LayerNorm in all published models of the kind.
  """

  arrays: dict[str, np.ndarray]
  naming: Naming
  keys: Mapping[str, Any]
  image_size: tuple[int, int]
  computed: Mapping[str, Any] = {'norm_eps': EPSILON}
  epsilon: float = EPSILON


def gelu(path: str, name: str) -> str:
  """Which form, by the name that a config has for it.

  Raises:
    UserError: it is none of them.
  """
  if name not in GELUS:
    raise UserError(
      f'{path} computes with the activation {name!r}; the model vit has '
      f'{", ".join(GELUS)} only.'
    )
  return GELUS[name]


def pretrained(path: str, found: Described, unseen: Unseen) -> Pretrained:
  """A model's weights under another project's names.

  Args:
    path: for messages.
    found: what the arrays tell.
    unseen: what they do not; logged.

  Raises:
    UserError: parameters that are missing, too many, of another shape or kind,
      or a kind of model that none here can be.
  """
  arrays, naming, image_size = found.arrays, found.naming, found.image_size
  if unseen.epsilon is None:
    unseen = dataclasses.replace(unseen, epsilon=found.epsilon)
  naming_lib.check_floats(path, arrays)
  came = {name: array.shape for name, array in arrays.items()}
  head = naming.part('head/kernel')
  assert head is not None
  outputs = came.get(head.name) or (0,)
  num_classes = outputs[0 if naming.torch else -1]
  names = list(unseen.class_names) if num_classes else []
  names = names or [f'class {i}' for i in range(num_classes)]
  about = {
    'format': checkpoint.FORMAT,
    'model': _section(path, found, unseen),
    'objective': {'name': 'supervised'},
    'num_classes': num_classes,
    'image_size': list(image_size),
    'preprocess': dict(unseen.preprocess),
    'class_names': names,
    'normalization': {'mean': list(unseen.mean), 'std': list(unseen.std)},
  }

  def put(abstract: PyTree) -> PyTree:
    wanted = {k: v.shape for k, v in tree.flatten(abstract).items()}
    naming_lib.check(path, came, naming_lib.shapes(wanted, naming))
    flat = naming_lib.native(arrays, wanted, naming)
    flat = normalization.fold(flat, unseen.mean, unseen.std)
    return jax.tree.map(place, tree.unflatten(flat), abstract)

  source = Pretrained(path, about, put)
  shapes = tree.flatten(abstract_params(source.model(), image_size))
  wanted = {k: v.shape for k, v in shapes.items()}
  naming_lib.check(path, came, naming_lib.shapes(wanted, naming))
  _say(path, unseen)
  return source


def _section(path: str, found: Described, unseen: Unseen) -> dict[str, Any]:
  """The `model` section; raises UserError where the model lacks an option."""
  said = {'gelu': unseen.gelu, 'norm_eps': unseen.epsilon}
  said = {k: v for k, v in said.items() if v != found.computed.get(k)}
  section = {'name': 'vit', 'dtype': 'float32', **said, **found.keys}
  known = {'name', *plugins.keys(sections.constructor('model', section))}
  unknown = {k: v for k, v in section.items() if k not in known}
  if unknown:
    shown = ', '.join(f'{key}={value}' for key, value in unknown.items())
    raise UserError(
      f'{path} holds a model with {shown}, which the model '
      f'{section["name"]} does not have.'
    )
  return section


def without_class_position(
  arrays: dict[str, np.ndarray], cls: str, table: str
) -> dict[str, np.ndarray]:
  """The class token with its position, and the positions of patches alone.

  Args:
    arrays: {name: array}.
    cls: name of the class token `[1, 1, d]`.
    table: name of the position embedding `[1, 1 + patches, d]`.
  """
  first, patches = np.split(arrays[table], [1], axis=1)
  return arrays | {cls: arrays[cls] + first, table: patches}


def _say(path: str, unseen: Unseen) -> None:
  log.info(
    '%s: what its arrays do not show is taken from %s: gelu %s, LayerNorm ε '
    '%g, mean %s, std %s, preprocess %s; say otherwise by load_pretrained(…, '
    'gelu=…, mean=…, std=…) and --config.preprocess.KEY=…',
    *(path, unseen.known_from, unseen.gelu, unseen.epsilon),
    *(tuple(unseen.mean), tuple(unseen.std), dict(unseen.preprocess) or '{}'),
  )


def exported(
  params: PyTree, about: dict[str, Any], naming: Naming
) -> dict[str, np.ndarray]:
  """A model's parameters under another project's names.

  Args:
    params: of the objective that `about` names.
    about: see `Pretrained.about`; its mean and deviation are unfolded.
    naming: of the project.

  Raises:
    UserError: some have no name there.
  """
  source = Pretrained('', about, lambda abstract: None)
  check_positions(source.model(), ('learned',))
  backbone = source.backbone(params)
  flat = {k: np.asarray(v) for k, v in tree.flatten(backbone).items()}
  mean, std = mean_and_std(about)
  flat = normalization.unfold(flat, mean, std)
  return dict(naming_lib.export(flat, naming))


def check_positions(model: Any, known: tuple[str, ...]) -> None:
  """Raises UserError where a format cannot say how positions are told."""
  position = getattr(model, 'position', 'learned')
  if position not in known:
    raise UserError(
      f'this format has positions of the kind {" or ".join(known)}, and this '
      f'model {position!r}, which its parameters do not show: write a '
      'directory instead.'
    )


def warn_of_unsaid(path: str, model: Any) -> None:
  """Warns of what a file without notes cannot say: readers take JAX's own.

  Args:
    path: of the file that is written.
    model: whose GELU and ε are compared with the official JAX models'.
  """
  said = {'gelu': 'tanh', 'norm_eps': EPSILON}
  other = [
    f'{key}={getattr(model, key)!r} (and not {value!r})'
    for key, value in said.items()
    if getattr(model, key, value) != value
  ]
  if other:
    log.warning(
      '%s has no place for what this model computes with: say %s to whatever '
      'reads it',
      *(path, ' and '.join(other)),
    )


def mean_and_std(about: dict[str, Any]) -> tuple[list[float], list[float]]:
  """What pixels in [0, 1] are normalised by before weights are exported."""
  mean, std = normalization.NONE
  found = about.get('normalization', {'mean': mean, 'std': std})
  return list(found['mean']), list(found['std'])
