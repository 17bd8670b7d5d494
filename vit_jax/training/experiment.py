"""Builds the objects of a config: model, optimizer, mesh, data transforms.

`Experiment.build` opens no data, so plans and evaluations can use it too.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import flops, sharding, tree
from vit_jax.config import keys
from vit_jax.config.completion import flatten
from vit_jax.config.durations import Length
from vit_jax.config.keys import square
from vit_jax.config.schema import Config, build_section
from vit_jax.data import contract
from vit_jax.data.contract import Preprocess, Transform
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import check_best
from vit_jax.models import positions
from vit_jax.models.contract import Model, abstract_key
from vit_jax.objectives import lora
from vit_jax.objectives.contract import Frozen, Inputs, Objective, Setting
from vit_jax.optim import optimizers
from vit_jax.run import resume
from vit_jax.run.guards import Recovery
from vit_jax.run.metrics import Log
from vit_jax.training import frozen
from vit_jax.training.step import Trainer
from vit_jax.weights import adapters, pretrained
from vit_jax.weights.description import Description

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
  """The objects that a config describes, except its data.

  Attributes:
    config: completed config, which contains all defaults.
    mesh: mesh of the devices.
    trainer: objective, optimizer and learning rate schedule.
    setting: arguments that the objective was built with.
    length: length of the training.
    augment: transform of training examples, run on the host.
    preprocess: transform of evaluation examples.
    reader: workers, prefetching and the policy for bad records.
    recovery: reactions to bad steps, slow hosts and lost processes.
    log: cadence and destinations of metrics.
  """

  config: Config
  mesh: Mesh
  trainer: Trainer
  setting: Setting
  length: Length
  augment: Transform
  preprocess: Preprocess
  reader: stream.Reader
  recovery: Recovery
  log: Log

  @classmethod
  def build(cls, config: Config, devices: Sequence[Any]) -> 'Experiment':
    """Builds the experiment of a config.

    Every section is built once and kept, so an invalid value is reported
    before any data is opened.

    Args:
      config: completed config.
      devices: devices of the mesh. If they are absent ones of a topology,
        programs can be compiled, but not run.

    Raises:
      UserError: a value in the config is invalid; see each constructor.
    """
    length = keys.length(config)
    mesh = build_section(config, 'mesh', devices)
    devices_of_batch = sharding.batch_parts(mesh)
    micro_batches = config.micro_batches
    divisor = devices_of_batch * max(micro_batches, 1)
    if micro_batches < 1 or config.batch_size % divisor:
      raise UserError(
        f'batch_size is {config.batch_size}; data x fsdp = {devices_of_batch} '
        f'devices and micro_batches={micro_batches} must divide it: set '
        f'--config.batch_size to a multiple of {divisor}.'
      )
    image_size = square(config.image_size)
    augment = build_section(config, 'augment', image_size)
    if hasattr(augment, 'in_batches'):
      augment = augment.in_batches(config.batch_size, config.micro_batches)
    recovery = build_section(config, 'recovery')

    model = build_section(config, 'model', config.num_classes)
    model.check(image_size)
    setting = Setting(
      model=model,
      image_size=image_size,
      mix=build_section(config, 'mix', config.num_classes),
      steps=functools.partial(_steps, config, length),
      open_frozen=frozen.open_frozen,
      transform=augment,
    )
    schedule = build_section(
      config, 'schedule', length.total_steps, setting.steps
    )
    objective = _objective(config, setting)
    optimizer_setting = optimizers.Setting(
      setting.steps, objective.layers_above
    )
    trainer = Trainer(
      objective=objective,
      optimizer=build_section(config, 'optimizer', schedule, optimizer_setting),
      schedule=schedule,
      micro_batches=config.micro_batches,
      average_decay=config.average_decay,
      spike_factor=recovery.spike_factor,
    )
    experiment = cls(
      config,
      mesh,
      trainer,
      setting,
      length,
      augment,
      preprocess=build_section(config, 'preprocess', image_size),
      reader=build_section(config, 'reader'),
      recovery=recovery,
      log=build_section(config, 'log'),
    )
    experiment._check()
    return experiment

  def _check(self) -> None:
    """Checks that the values of different sections fit together.

    Raises:
      UserError: two sections do not fit together, or a duration is invalid.
    """
    config = self.config
    if config.position_resize is not None:
      positions.check_method(config.position_resize)
    self._check_images()
    for _, variant in self.variants:
      variant.model.check(variant.image_size)
      variant.objective.check(variant.augment.spec)
      if variant is self:
        continue
      params = self.abstract_state.params
      if tree.shapes(variant.abstract_state.params) != tree.shapes(params):
        raise UserError(
          f'the model for {variant.image_size} pixels has parameters of other '
          "shapes: several sizes (augment.sizes) need model.position='none'."
        )
    if locked := self.objective.locked:
      trained = self.trainer.trained(self.abstract_state.params)
      paths = tree.flatten(trained)
      if any(re.fullmatch(locked, path) for path in paths):
        raise UserError(
          f'the objective needs the parameters {locked!r} to stay as they are: '
          f'add ({locked!r}, dict(frozen=True)) to config.optimizer.rules.'
        )
    for section in (config.checkpoint, config.log, *config.evals.values()):
      self.steps(section.every)  # raises if it is not a duration
    names: Iterable[str] = ()
    if config.checkpoint.best is not None:
      state = self.abstract_state
      models = frozen.abstract(self.frozen, self.mesh)
      names = jax.eval_shape(self.trainer.weights, state, models)
    check_best(config, names)

  def _check_images(self) -> None:
    """Checks that the transforms return the images that the model receives.

    Raises:
      UserError: the channels of an `image` differ from the model's, its dtype
        differs between training and evaluation, or random erasing is used with
        images that are not RGB with 8 bits.
    """
    channels = self.model.channels
    images = {}  # channels and dtype by section
    for section in ('augment', 'preprocess'):
      shape, dtype = getattr(self, section).spec.get('image', ((), None))
      if len(shape) >= 3:
        images[section] = shape[-1], np.dtype(dtype).name
    # A transform of a user may return floats, whose scale is its own choice.
    dtypes = {name for _, name in images.values() if name.startswith('uint')}
    has_other_channels = any(n != channels for n, _ in images.values())
    if len(dtypes) > 1 or has_other_channels:
      raise UserError(
        f'the images are {images}, and model.channels is {channels}: set '
        'model.channels, augment.channels, preprocess.channels, augment.bits '
        'and preprocess.bits to those of the data.'
      )
    erasing = self.setting.mix.erasing
    if erasing and (channels != 3 or 'uint16' in dtypes):
      raise UserError(
        f'mix.erasing is {erasing}; its noise looks like RGB images of 8 bits, '
        f'but the images are {images}: set mix.erasing=0.'
      )

  @property
  def model(self) -> Model:
    """The model of the objective."""
    return self.setting.model

  @property
  def objective(self) -> Objective:
    """The objective, which holds the model and defines the loss."""
    return self.trainer.objective

  @property
  def image_size(self) -> tuple[int, int]:
    """Height and width of the training images, in pixels."""
    return self.setting.image_size

  @property
  def total_steps(self) -> int:
    """Number of updates in the whole training."""
    return self.length.total_steps

  def steps(self, duration: str) -> int:
    """Converts a duration ('5 epochs') to updates of this training."""
    return self.setting.steps(duration)

  @functools.cached_property
  def image_flops(self) -> float:
    """FLOPs of a training step per image; see `flops.of_training`.

    They are counted with the model's `reference`, so that FLOPs of kernels,
    rematerialization or padding do not count as useful. With several
    `variants`, it is the mean.
    """
    if len(self.variants) > 1:
      return sum(
        probability * variant.image_flops
        for probability, variant in self.variants
      )
    trainer = self.with_model(self.model.reference).trainer
    # Shapes in place of arrays: the loss is only traced.
    batch: Any = {
      key: leaf.update(sharding=None)
      for key, leaf in self.abstract_batch().items()
    }
    key = abstract_key()
    params, extra = jax.eval_shape(trainer.objective.init, key, batch)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    inputs = Inputs(extra, batch, key, step, {})
    # `flops.of_training` counts no gradients of its argument `frozen`: here the
    # frozen parameters of the model, and the frozen models.
    fixed = params, frozen.abstract(self.frozen, self.mesh)

    def loss(trained: Any, inputs: Inputs, *, frozen: Any) -> Any:
      all_params, models = frozen
      return trainer.loss(trained, all_params, inputs._replace(frozen=models))

    total = flops.of_training(
      loss, trainer.trained(params), inputs, frozen=fixed
    )
    return total / self.config.batch_size

  def with_model(self, model: Model) -> 'Experiment':
    """Returns the experiment with another implementation of its model.

    Args:
      model: new model, which must have the same parameters.
    """
    return self._with_setting(model=model)

  def _with_setting(self, **changes: Any) -> 'Experiment':
    """Returns the experiment with another model, transform or image size."""
    setting = self.setting._replace(**changes)
    objective = _objective(self.config, setting)
    trainer = dataclasses.replace(self.trainer, objective=objective)
    return dataclasses.replace(
      self, trainer=trainer, setting=setting, augment=setting.transform
    )

  @functools.cached_property
  def variants(self) -> tuple[tuple[float, 'Experiment'], ...]:
    """Probability and experiment of each size of batches.

    See `data.contract.Transform`. Their states are the same. Usually there is
    one, this experiment itself.
    """

    def variant(transform: Transform) -> 'Experiment':
      if transform is self.augment:
        return self
      image_size = getattr(transform, 'image_size', self.image_size)
      return self._with_setting(transform=transform, image_size=image_size)

    return tuple(
      (probability, variant(transform))
      for probability, transform in contract.variants(self.augment)
    )

  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of a training batch."""
    spec = contract.train_spec(self.augment, self.reader.on_bad_record)
    over_devices = sharding.batch_sharding(self.mesh)
    entries = contract.layout(spec, self.config.batch_size).items()
    return {
      key: jax.ShapeDtypeStruct(shape, dtype, sharding=over_devices)
      for key, (shape, dtype) in entries
    }

  @functools.cached_property
  def frozen(self) -> dict[str, Frozen]:
    """Models that the objective uses and does not train, by name."""
    return self.objective.frozen()

  def init_state(self, key: jax.Array) -> PyTree:
    """Computes the initial training state.

    The function is pure, so it can be traced.

    Args:
      key: random key of the run.
    """
    return self.trainer.state_of(
      *self.objective.init(key, self.abstract_batch())
    )

  @functools.cached_property
  def abstract_state(self) -> PyTree:
    """Shapes and shardings of the whole training state."""
    # Only shapes are computed, because `plan` has no devices to run code on.
    shapes = jax.eval_shape(self.init_state, abstract_key())
    rules = self.objective.sharding_rules
    return sharding.with_shardings(
      shapes, self.mesh, rules, self.config.mesh.zero1
    )

  def description(self, source: stream.Source, models: PyTree) -> Description:
    """Returns the description that makes a checkpoint usable by itself.

    With it, the weights can be evaluated, and the run can be identified,
    without the workdir.

    Args:
      source: source of the training examples.
      models: parameters of the models in `frozen`, by name.
    """
    config, digests = self.config.to_dict(), frozen.digests(models)
    record = resume.record(source.fingerprint, digests)
    keys = ('model', 'objective', 'preprocess', 'source', 'num_classes')
    return Description(
      **{key: config[key] for key in keys},
      image_size=self.image_size,
      class_names=tuple(source.class_names),
      config=config,
      further={'record': record},
    )


def _steps(config: Config, length: Length, duration: str) -> int:
  """Converts a duration to updates; an error names the keys that have it."""
  try:
    return length.steps(duration)
  except UserError as error:
    values = flatten(config).items()
    paths = [f'config.{path}' for path, value in values if value == duration]
    raise UserError(f'{" or ".join(paths) or "a duration"}: {error}') from error


def _objective(config: Config, setting: Setting) -> Objective:
  """Builds the objective, with LoRA if the config sets a rank."""
  objective = build_section(config, 'objective', setting)
  base = adapters.base(
    pretrained.find, config, setting.model, setting.image_size
  )
  return lora.adapted(objective, build_section(config, 'lora'), base)
