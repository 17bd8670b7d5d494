"""Builds what a config describes: model, optimizer, mesh and data.

`Experiment.build` touches no data, so a plan or an evaluation can use it too.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.arrays import flops, sharding
from vit_jax.checkpoint import FORMAT
from vit_jax.config import completion as config_lib
from vit_jax.config import durations, plugins, sections
from vit_jax.config.completion import Config
from vit_jax.config.sections import build_section
from vit_jax.data import contract, fingerprint, matching
from vit_jax.data.augment.transforms import square
from vit_jax.data.contract import Preprocess, Transform
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError
from vit_jax.evaluators import best
from vit_jax.evaluators import contract as evaluation
from vit_jax.models.contract import Model
from vit_jax.models.layers import positions
from vit_jax.objectives.contract import Setting
from vit_jax.run import bad_records, identity
from vit_jax.run.ledger import Ledger
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
    )
    trainer = Trainer(
      objective=build_section(config, 'objective', setting),
      optimizer=build_section(config, 'optimizer', schedule),
      schedule=schedule,
      micro_batches=config.micro_batches,
      average_decay=config.average_decay,
      spike_factor=config.recovery.spike_factor,
    )
    experiment = cls(config, mesh, trainer, setting, total)
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
    batch = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
      self.abstract_batch(),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, extra = jax.eval_shape(objective.init, key, batch)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    total = flops.of_training(
      lambda *arguments: objective.loss(*arguments)[0],
      *(params, extra, batch, key, step),
    )
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

  def init_state(self, key: jax.Array) -> PyTree:
    """The initial training state; a pure function, to be traced."""
    return self.trainer.init_state(key, self.abstract_batch())

  def abstract_state(self) -> PyTree:
    """Shapes and shardings of the whole training state."""
    key = jax.eval_shape(lambda: jax.random.key(0))  # nothing runs: see plan
    shapes = jax.eval_shape(self.init_state, key)
    rules = self.trainer.objective.sharding_rules
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

  def open_source(
    self, split: str, class_names: Sequence[str] | None = None
  ) -> stream.Source:
    """Opens a split of the config's source.

    Args:
      split: in the TFDS way.
      class_names: of the training data, to which labels are matched.

    Raises:
      UserError: it has more classes than the head, or others than those of
        the training data; what the source raises.
    """
    source = build_section(self.config, 'source', split)
    if source.num_classes > self.config.num_classes:
      raise UserError(
        f'{source.name} has {source.num_classes} classes and the head '
        f'{self.config.num_classes}: set --config.num_classes='
        f'{source.num_classes}.'
      )
    if class_names is None:
      return source
    return matching.matched(source, class_names, 'the training data')

  def open_train_source(self) -> stream.Source:
    """Opens the training split and checks its size.

    Raises:
      UserError: its size is not `train.num_examples`.
    """
    train = self.config.train
    source = self.open_source(train.split)
    if len(source) != train.num_examples:
      raise UserError(
        f'{source.name} has {len(source)} examples, and config.train.'
        f'num_examples is {train.num_examples}, of which epochs and the '
        f'schedule are made: set --config.train.num_examples={len(source)}.'
      )
    return source

  def train_batches(
    self,
    source: stream.Source,
    start_step: int,
    ledger: Ledger | None = None,
    skipped: tuple[int, ...] = (),
  ) -> stream.Stream:
    """The stream of training batches after `start_step` updates."""
    return stream.train_batches(
      source,
      self.augment(),
      self.config.batch_size,
      self.config.seed,
      start_step,
      self.mesh,
      reader=build_section(self.config, 'reader'),
      skipped=skipped,
      report=bad_records.report_to(ledger),
    )

  def augment(self) -> Transform:
    """What training does to examples, on the host."""
    return build_section(self.config, 'augment', self.image_size)

  def preprocess(self) -> Preprocess:
    """What evaluation does to examples."""
    return build_section(self.config, 'preprocess', self.image_size)

  def evaluator(
    self,
    name: str,
    ledger: Ledger,
    check: Callable[[], None],
    class_names: Sequence[str],
  ) -> evaluation.Evaluator:
    """Builds one of the config's evaluators; see `evaluators.contract`.

    Args:
      name: in `config.evals`.
      ledger: where bad records are listed.
      check: called with every batch.
      class_names: of the training data; labels are matched with them.

    Raises:
      UserError: what the evaluator raises, with its name.
    """
    section = self.config.evals[name]
    setting = evaluation.Setting(
      open_source=functools.partial(self.open_source, class_names=class_names),
      transform=self.preprocess(),
      predict=self.trainer.objective.predict,
      mesh=self.mesh,
      batch_size=self.config.batch_size,
      reader=build_section(self.config, 'reader'),
      report=bad_records.report_to(ledger),
      check=check,
    )
    try:
      return sections.build('evals', section, setting)
    except UserError as error:  # an evaluator does not know its name
      raise UserError(f'config.evals.{name}: {error}') from error

  def about(self, source: stream.Source) -> dict[str, Any]:
    """What a checkpoint stores so that it can be used without its workdir."""
    config = self.config.to_dict()
    keys = ('model', 'objective', 'preprocess', 'source', 'num_classes')
    return {
      'format': FORMAT,
      **{key: config[key] for key in keys},
      'image_size': list(self.image_size),
      'class_names': list(source.class_names),
      'record': identity.record(fingerprint.of(source)),
      'config': config,
    }


def _check_batch(config: Config, mesh: Mesh) -> None:
  split = mesh.shape['data'] * mesh.shape['fsdp']
  parts = config.micro_batches
  if parts < 1 or config.batch_size % (split * parts):
    raise UserError(
      f'batch_size {config.batch_size} is not divisible by data x fsdp x '
      f'micro_batches = {mesh.shape["data"]} x {mesh.shape["fsdp"]} x {parts}: '
      f'take a multiple of {split * max(parts, 1)}.'
    )
