"""Builds what a config describes: model, optimizer, mesh and data.

`Experiment.build` touches no data, so a plan or an evaluation can use it too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.arrays import flops, sharding
from vit_jax.checkpoint import FORMAT
from vit_jax.config import completion as config_lib
from vit_jax.config import durations, plugins
from vit_jax.config.completion import Config
from vit_jax.config.sections import build_section
from vit_jax.data import contract, fingerprint
from vit_jax.data.augment.transforms import square
from vit_jax.data.contract import Preprocess, Transform
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError
from vit_jax.evaluators import best
from vit_jax.models.contract import Model
from vit_jax.models.layers import positions
from vit_jax.objectives.contract import Frozen, Objective, Setting
from vit_jax.run import identity
from vit_jax.training import frozen
from vit_jax.training.step import Trainer

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
  """Everything that a config describes, apart from its data.

  Attributes:
    config: completed.
    mesh: of the devices.
    trainer: objective, optimizer, schedule.
    setting: what the objective was built with.
    total_steps: updates in the whole training.
  """

  config: Config
  mesh: Mesh
  trainer: Trainer
  setting: Setting
  total_steps: int

  @classmethod
  def build(cls, config: Config, devices: Sequence[Any]) -> 'Experiment':
    """Builds it for some devices.

    Raises:
      UserError: an invalid value in the config; see each constructor.
    """
    plugins.build(config_lib.top_level, config)
    positions.check_method(config.position_resize)
    mesh = build_section(config, 'mesh', devices)
    _check_batch(config, mesh)
    image_size = square(config.image_size)
    for section in ('train', 'reader', 'recovery', 'log'):
      build_section(config, section)
    for section in ('augment', 'preprocess'):
      build_section(config, section, image_size)
    model = build_section(config, 'model', config.num_classes)
    model.check(image_size)
    size = dict(
      batch_size=config.batch_size, num_examples=config.train.num_examples
    )
    total = durations.to_steps(config.total, **size)
    warmup = durations.to_steps(
      config.schedule.warmup, total_steps=total, **size
    )
    schedule = build_section(config, 'schedule', total, warmup)
    setting = Setting(
      model=model,
      image_size=image_size,
      mix=build_section(config, 'mix', config.num_classes),
      steps=functools.partial(durations.to_steps, total_steps=total, **size),
      open_frozen=frozen.open_frozen,
    )
    trainer = Trainer(
      objective=build_section(config, 'objective', setting),
      optimizer=build_section(config, 'optimizer', schedule, setting.steps),
      schedule=schedule,
      micro_batches=config.micro_batches,
      average_decay=config.average_decay,
      spike_factor=config.recovery.spike_factor,
    )
    experiment = cls(config, mesh, trainer, setting, total)
    experiment.objective.check(experiment.augment().spec)
    timed = [config.checkpoint, config.log, *config.evals.values()]
    for section in timed:  # raises if one is no duration
      experiment.steps(section.every)
    if config.checkpoint.best is not None:
      state = experiment.abstract_state()
      best.check(config, jax.eval_shape(trainer.weights, state))
    return experiment

  @property
  def model(self) -> Model:
    """The model of the objective."""
    return self.setting.model

  @property
  def objective(self) -> Objective:
    """What is trained, and by what loss."""
    return self.trainer.objective

  @property
  def image_size(self) -> tuple[int, int]:
    """(height, width), pixels."""
    return self.setting.image_size

  def steps(self, duration: str) -> int:
    """A duration of this training, in updates."""
    return self.setting.steps(duration)

  @functools.cached_property
  def image_flops(self) -> float:
    """FLOPs of a training step for each image, see `flops.of_training`.

    They are counted with the model's `reference`, so that FLOPs of kernels,
    rematerialisation or padding do not count as useful.
    """
    plain = self.setting._replace(model=self.model.reference)
    objective = build_section(self.config, 'objective', plain)
    batch = self.abstract_batch()
    batch = {key: leaf.update(sharding=None) for key, leaf in batch.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(objective.init, key, batch)
    taught = frozen.abstract(self.frozen, self.mesh)
    loss = lambda *arguments: objective.loss(*arguments)[0]  # noqa: E731
    step = jax.ShapeDtypeStruct((), jnp.int32)
    total = flops.of_training(loss, *state, batch, key, step, taught)
    return total / self.config.batch_size

  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a training batch."""
    on_bad_record = self.config.reader.on_bad_record
    spec = contract.train_spec(self.augment(), on_bad_record)
    split = sharding.batch_sharding(self.mesh)
    entries = contract.layout(spec, self.config.batch_size).items()
    return {
      key: jax.ShapeDtypeStruct(shape, dtype, sharding=split)
      for key, (shape, dtype) in entries
    }

  @functools.cached_property
  def frozen(self) -> dict[str, Frozen]:
    """Models that the objective uses and does not train."""
    return self.objective.frozen()

  def init_state(self, key: jax.Array) -> PyTree:
    """The initial training state; a pure function, to be traced."""
    return self.trainer.init_state(key, self.abstract_batch())

  def abstract_state(self) -> PyTree:
    """Shapes and shardings of the whole training state."""
    return self._abstract_state

  @functools.cached_property
  def _abstract_state(self) -> PyTree:
    key = jax.eval_shape(lambda: jax.random.key(0))  # nothing runs: see plan
    shapes = jax.eval_shape(self.init_state, key)
    rules = self.objective.sharding_rules
    return sharding.with_shardings(
      shapes, self.mesh, rules, self.config.mesh.zero1
    )

  def key(self) -> jax.Array:
    """The run's random key, on every device."""
    make = jax.jit(
      lambda: jax.random.key(self.config.seed),
      out_shardings=sharding.replicated(self.mesh),
    )
    return make()

  def augment(self) -> Transform:
    """What training does to examples, on the host."""
    return build_section(self.config, 'augment', self.image_size)

  def preprocess(self) -> Preprocess:
    """What evaluation does to examples."""
    return build_section(self.config, 'preprocess', self.image_size)

  def about(self, source: stream.Source, models: PyTree) -> dict[str, Any]:
    """What a checkpoint stores so that it can be used without its workdir.

    Args:
      source: of the training.
      models: parameters of `frozen`.
    """
    config = self.config.to_dict()
    keys = ('model', 'objective', 'preprocess', 'source', 'num_classes')
    return {
      'format': FORMAT,
      **{key: config[key] for key in keys},
      'image_size': list(self.image_size),
      'class_names': list(source.class_names),
      'record': identity.record(fingerprint.of(source), frozen.digests(models)),
      'config': config,
    }


def batch_parts(batch_size: int, shares: int) -> list[int]:
  """Numbers of micro-batches that divide a device's share, ascending."""
  images = batch_size // shares
  return [k for k in range(1, images + 1) if images % k == 0]


def _check_batch(config: Config, mesh: Mesh) -> None:
  split = mesh.shape['data'] * mesh.shape['fsdp']
  parts = config.micro_batches
  if parts < 1 or config.batch_size % (split * parts):
    raise UserError(
      f'batch_size {config.batch_size} is not divisible by data x fsdp x '
      f'micro_batches = {mesh.shape["data"]} x {mesh.shape["fsdp"]} x {parts}: '
      f'take a multiple of {split * max(parts, 1)}.'
    )
