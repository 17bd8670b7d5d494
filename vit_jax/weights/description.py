"""What weights are: model, objective and preprocessing, without the arrays."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.checkpoint import FORMAT
from vit_jax.config import completion, schema
from vit_jax.config.keys import square
from vit_jax.config.schema import Section
from vit_jax.data import contract
from vit_jax.data.contract import Preprocess
from vit_jax.models.contract import Size, Statistics
from vit_jax.objectives.contract import Frozen, Setting
from vit_jax.objectives.lora import adapted

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
  """Everything that is needed to use weights, except their arrays.

  Model, objective and the shapes of the parameters are computed once, when they
  are first used. `dataclasses.replace` returns a description of other weights,
  which computes them from its own values.

  Attributes:
    model: config section of the model, with its `name`; keys may be left out.
    num_classes: number of outputs of the model's head; 0 for no head.
    image_size: (height, width) of the images that the weights are for, pixels.
    objective: config section of the objective.
    preprocess: config section of the transform for evaluation.
    class_names: name of each class, in the order of the outputs; () if unknown.
    statistics: mean and std of pixels in [0, 1] that are folded into the patch
      embedding of weights of another project; None if these are known to be in
      [-1, 1].
    position_resize: method by which the project of the weights interpolates
      positions, see `metadata.ModelMetadata`.
    other_patches: number of patches for which the positions fit as well, see
      `metadata.ModelMetadata`.
    source: config section of the training data; {} if it is not known.
    config: config of the run that wrote a checkpoint; {} for other weights.
    further: other values in the JSON of a checkpoint, such as the record of its
      run, which are written as they were read.
    frozen: weights that LoRA was trained on; None if the weights are those of a
      whole model. It is not stored.
  """

  model: Section
  num_classes: int
  image_size: Size
  objective: Section = dataclasses.field(
    default_factory=lambda: {'name': 'supervised'}
  )
  preprocess: Section = dataclasses.field(default_factory=dict)
  class_names: tuple[str, ...] = ()
  statistics: Statistics | None = None
  position_resize: str | None = None
  other_patches: int | None = None
  source: Section = dataclasses.field(default_factory=dict)
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  further: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  frozen: Frozen | None = None

  @classmethod
  def of_json(cls, values: Mapping[str, Any]) -> 'Description':
    """Returns the description that the item `about` of a checkpoint contains.

    Args:
      values: JSON object, see `to_json`.
    """
    rest = {key: values[key] for key in values if key != 'format'}
    known = {field.name for field in dataclasses.fields(cls)}
    given = {key: rest.pop(key) for key in known & rest.keys()}
    if statistics := rest.pop('normalization', None):
      given['statistics'] = tuple(statistics['mean']), tuple(statistics['std'])
    given['image_size'] = square(tuple(given['image_size']))
    given['class_names'] = tuple(given.get('class_names', ()))
    return cls(**given, further=rest)

  def to_json(self) -> dict[str, Any]:
    """Returns the item `about` of a checkpoint."""
    whole = dataclasses.replace(self, frozen=None)
    values = {'format': FORMAT, **dataclasses.asdict(whole)}
    if statistics := values.pop('statistics'):
      mean, std = statistics
      values['normalization'] = {'mean': mean, 'std': std}
    further = values.pop('further')
    given = {k: v for k, v in values.items() if v not in (None, {})}
    return given | further

  def with_model(self, **changes: Any) -> 'Description':
    """Returns a description with changes to the model's section.

    Args:
      **changes: keys of the section and their new values.

    Raises:
      UserError: the model has no such key.
    """
    keys = schema.config_keys(schema.constructor('model', self.model))
    for key in changes:
      if key not in keys:
        raise completion.unknown_key('model.', key, keys)
    section = {**self.model, **changes}
    if section == self.model:
      return self
    return dataclasses.replace(self, model=section)

  @property
  def preprocess_section(self) -> dict[str, Any]:
    """Config section of the transform for evaluation, with its `name`."""
    return {'name': 'transforms', **self.preprocess}

  @functools.cached_property
  def built_model(self) -> Any:
    """The model, see `models.contract.Model`."""
    return schema.build('model', self.model, self.num_classes)

  @functools.cached_property
  def built_objective(self) -> Any:
    """The objective with its model, for `predict`."""
    setting = Setting(self.built_model, self.image_size)
    objective = schema.build('objective', self.objective, setting)
    if self.frozen is None:
      return objective
    lora = schema.build('lora', self.config['lora'])
    return adapted(objective, lora, self.frozen)

  def transform(self) -> Preprocess:
    """Builds the transform that evaluation applies to examples."""
    return schema.build('preprocess', self.preprocess, self.image_size)

  @functools.cached_property
  @jax.enable_x64(False)  # parameters are float32 in programs of 64 bits, too
  def shapes(self) -> tuple[PyTree, PyTree]:
    """Shapes of the objective's parameters, and of its extra state."""
    # Examples of a classifier, unless a run has determined others
    image_shape = (*self.image_size, self.built_model.channels)
    spec: contract.Spec = {'image': (image_shape, np.dtype(np.uint8))}
    if augment := self.config.get('augment'):
      transform = schema.build('augment', augment, self.image_size)
      spec = contract.check_spec(transform)
    batch = {
      key: jax.ShapeDtypeStruct(shape, dtype)
      for key, (shape, dtype) in contract.layout(spec, 1).items()
    }
    key = jax.eval_shape(jax.random.key, 0)
    return jax.eval_shape(self.built_objective.init, key, batch)
