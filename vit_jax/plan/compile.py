"""Compiles a config's training step for absent devices: the `Plan` of a run.

XLA's options for the step are in three places, by their reason:
- The method `compiler_options` of a model: for the structure of the model, such
  as equal layers, which are compiled once.
- `training.compiling`: for every step on a platform.
- `GPU_OPTIONS` below: for compilation without a GPU; runs do not use them.

Compiled programs are cached on disk. JAX's own cache cannot be used, because it
restores executables, which requires the devices. A plan uses only the text of
the optimized program and its memory.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from vit_jax.arrays import memory, tree
from vit_jax.config import durations
from vit_jax.config.schema import Config
from vit_jax.files import paths
from vit_jax.plan import gpu_cost, hlo, tpu_cost
from vit_jax.plan.cost import Cost
from vit_jax.plan.topology import Target
from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
SECONDS_PER_DAY = 86_400
# Without a GPU, XLA cannot time kernels to select the best one (autotuning).
# Triton's matrix products need tile sizes that autotuning selects, so cuBLAS is
# used, which selects its kernels itself.
GPU_OPTIONS = {
  'xla_gpu_autotune_level': '0',
  'xla_gpu_enable_triton_gemm': False,
}
# Packages of compilers, by the beginnings of their names; and variables that
# compilers read.
_COMPILERS = ('jax', 'libtpu', 'nvidia')
_VARIABLES = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')


class Program(NamedTuple):
  """A compiled training step.

  Attributes:
    text: optimized HLO; '' if the backend does not return it.
    bytes: see `memory.program_bytes`.
    compile_seconds: time that the compiler took.
  """

  text: str
  bytes: dict[str, int] | None
  compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """Memory, time and cost of the compiled training step of one config.

  `--json` prints all fields but the first three, in this order. None means that
  a value is unknown, or does not exist for these devices. Values per device are
  those of one JAX device.

  Attributes:
    config: config that was compiled.
    cost: costs of the compiled program; None if it was not compiled, or if the
      compiler refuses it because it is too large.
    text: optimized HLO; '' if the program was refused or not compiled.
    topology: name of the devices.
    devices: number of devices.
    parameters: number of parameters.
    fits: whether the program fits in a device's memory.
    peak_bytes_per_device: memory that the program needs.
    hbm_bytes_per_device: memory that a program may use.
    flops_per_device: FLOPs of products in a step, including recomputed ones.
    model_flops_per_image: FLOPs of forward and backward pass of the model.
    predicted_step_seconds: time of a step.
    predicted_step_seconds_range: limits of the time of a step.
    uncertain_seconds: see `Cost`.
    predicted_mfu: model FLOPs per second, as a fraction of the peak rate.
    predicted_images_per_second: images per second on all devices.
    total_steps: number of steps of the training.
    predicted_core_days: days of TensorCores or GPUs for the whole training.
    collectives: number of collectives of a step, by kind.
    collective_bytes: bytes of the collectives of a step, by kind.
    collective_seconds: all sums over collectives, by kind; see `Collective`.
    exposed_collective_seconds: time of collectives that nothing hides.
    estimated_cycles: sum of the TPU compiler's estimates for a step.
    uncounted_cycles: cycles added for instructions without an estimate.
    uncounted: sums over these instructions, by kind; see `Uncounted`.
    kernels: sums over the kernels of a GPU, by kind; see `Kernels`.
    predicted_days: days of the whole training.
    least_days: days at the peak rate, if there is no compiler.
    paper_core_days: TPUv3 core-days that the paper reports.
    batch_size: number of images of a step.
    micro_batches: number of parts into which a batch is divided.
    images_per_device: number of images of a step per device.
    mesh: sizes of the axes of the mesh.
    remat: rematerialization policy of the model.
    unroll: number of layers that are unrolled.
    computed_by: parts of the model with special kernels.
    bytes: memory per device by use.
    compile_seconds: time of the compilation; not printed if None.
  """

  config: Config
  cost: Cost | None
  text: str
  topology: str
  devices: int
  parameters: int
  fits: bool = False
  peak_bytes_per_device: int | None = None
  hbm_bytes_per_device: int | None = None
  flops_per_device: int | None = None
  model_flops_per_image: float = 0.0
  predicted_step_seconds: float | None = None
  predicted_step_seconds_range: tuple[float, float] | None = None
  uncertain_seconds: dict[str, tuple[float, float]] | None = None
  predicted_mfu: float | None = None
  predicted_images_per_second: float | None = None
  total_steps: int = 0
  predicted_core_days: float | None = None
  collectives: dict[str, int] = dataclasses.field(default_factory=dict)
  collective_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
  collective_seconds: dict[str, Any] = dataclasses.field(default_factory=dict)
  exposed_collective_seconds: float | None = None
  estimated_cycles: int | None = None
  uncounted_cycles: int | None = None
  uncounted: dict[str, Any] = dataclasses.field(default_factory=dict)
  kernels: dict[str, Any] = dataclasses.field(default_factory=dict)
  predicted_days: float | None = None
  least_days: float | None = None
  paper_core_days: float | None = None
  batch_size: int = 0
  micro_batches: int = 1
  images_per_device: float = 0.0
  mesh: dict[str, int] = dataclasses.field(default_factory=dict)
  remat: str | None = None
  unroll: int | None = None
  computed_by: str | None = None
  bytes: dict[str, int] = dataclasses.field(default_factory=dict)
  compile_seconds: float | None = None

  @property
  def seconds(self) -> float:
    """Predicted time of a step in seconds; infinite if it is unknown."""
    return self.predicted_step_seconds or float('inf')

  def to_dict(self) -> dict[str, Any]:
    """Returns the values that `--json` prints."""
    names = [field.name for field in dataclasses.fields(self)][3:]
    values = {name: getattr(self, name) for name in names}
    if self.compile_seconds is None:
      del values['compile_seconds']
    return values


def changed(config: Config, **changes: Any) -> Config:
  """Returns a changed copy of a config.

  Args:
    config: config.
    **changes: new values by flat key; in a keyword, '__' stands for '.'.
  """
  copy = config.copy_and_resolve_references()
  flat = {key.replace('__', '.'): value for key, value in changes.items()}
  copy.update_from_flattened_dict(flat)
  return copy


def plan(
  config: Config,
  target: Target,
  compiler_options: Mapping[str, Any] | None = None,
  cache: epath.Path | None = None,
) -> Plan:
  """Compiles the training step that the loop would run, and analyses it.

  Args:
    config: config of the run.
    target: devices to compile for.
    compiler_options: options of XLA in addition to those of the run.
    cache: directory of programs that were compiled before; None to compile in
      any case.

  Raises:
    UserError: the config is invalid, or the number of iterations of a loop is
      unknown.
  """
  config = _with_warmup_that_fits(config)
  experiment = Experiment.build(config, target.devices)
  with jax.set_mesh(experiment.mesh):
    planned = _without_program(experiment, target)
    if not target.compiles:
      return _lower_bounds(planned, target)
    is_absent_gpu = target.on_gpus and not target.is_local
    options = dict(GPU_OPTIONS if is_absent_gpu else {})
    options |= compiler_options or {}
    try:
      program = compile_step(experiment, options, target.name, cache)
    except jax.errors.JaxRuntimeError as error:
      needed = memory.needed_bytes(str(error))
      if 'RESOURCE_EXHAUSTED' not in str(error) or needed is None:
        raise
      return dataclasses.replace(
        planned,
        peak_bytes_per_device=needed,
        bytes=planned.bytes | {'temporaries': needed},
      )
  sizes = dict(program.bytes or {})
  peak, limit = sizes.pop('peak', None), target.hbm_bytes
  planned = dataclasses.replace(
    planned,
    text=program.text,
    compile_seconds=program.compile_seconds,
    fits=limit is None or peak is None or peak <= limit,
    peak_bytes_per_device=peak,
    bytes=planned.bytes | sizes,
  )
  return _with_cost(planned, cost_of(program.text, target), target)


def cost_of(text: str, target: Target) -> Cost:
  """Returns the cost of a step, given as optimized HLO, on a device."""
  model = gpu_cost if target.on_gpus else tpu_cost
  return model.of_program(hlo.parse(text), target)


def _with_warmup_that_fits(config: Config) -> Config:
  """Removes the warm-up if it is longer than the training.

  This happens if a search tries huge batches. The plan of such a batch is still
  useful, because warm-up changes only a scalar of the compiled step.
  """
  size = dict(
    batch_size=config.batch_size, num_examples=config.train.num_examples
  )
  total = durations.to_steps(config.total, **size)
  warmup = durations.to_steps(config.schedule.warmup, total_steps=total, **size)
  if warmup < total:
    return config
  log.warning(
    'schedule.warmup is %s, but the training has only %d steps; planning '
    'without warm-up',
    config.schedule.warmup,
    total,
  )
  return changed(config, schedule__warmup='0 steps')


def _without_program(experiment: Experiment, target: Target) -> Plan:
  """Returns a plan with the values that do not depend on the program."""
  config, state = experiment.config, experiment.abstract_state()
  return Plan(
    config=config,
    cost=None,
    text='',
    topology=target.name,
    devices=len(target.devices),
    parameters=tree.size(state.params),
    hbm_bytes_per_device=target.hbm_bytes,
    model_flops_per_image=experiment.image_flops,
    total_steps=experiment.total_steps,
    paper_core_days=config.paper_core_days,
    batch_size=config.batch_size,
    micro_batches=config.micro_batches,
    images_per_device=config.batch_size / len(target.devices),
    mesh=dict(experiment.mesh.shape),
    remat=config.model.get('remat'),
    unroll=config.model.get('unroll'),
    computed_by=experiment.model.computed_by(experiment.image_size),
    bytes={
      'parameters': memory.tree_bytes(state.params),
      'optimizer': memory.tree_bytes(state.opt_state),
      'average': memory.tree_bytes(state.average),
      'extra': memory.tree_bytes(state.extra),
      'batch': memory.tree_bytes(experiment.abstract_batch()),
    },
  )


def _lower_bounds(planned: Plan, target: Target) -> Plan:
  """Adds lower bounds of memory and time for GPUs without a compiler."""
  assert target.device is not None and target.hbm_bytes is not None
  state_and_batch = sum(planned.bytes.values())
  flops = planned.model_flops_per_image * planned.batch_size
  seconds = flops / planned.devices / target.device.peak_flops
  return dataclasses.replace(
    planned,
    fits=state_and_batch <= target.hbm_bytes,
    peak_bytes_per_device=state_and_batch,
    least_days=seconds * planned.total_steps / SECONDS_PER_DAY,
    computed_by=None,  # unknown, because CPU devices stand for the GPUs
  )


def _with_cost(planned: Plan, total: Cost, target: Target) -> Plan:
  """Adds the cost of the program, and what follows from the step's time."""
  seconds = total.seconds
  exchanged = sorted(total.collectives.items())
  uncounted = sorted(total.uncounted.items(), key=lambda item: -item[1].cycles)
  changes: dict[str, Any] = {
    'cost': total,
    'flops_per_device': total.matrix_flops,
    'predicted_step_seconds': seconds,
    'predicted_step_seconds_range': total.seconds_range,
    'uncertain_seconds': total.uncertain_seconds,
    'collectives': {kind: sums.count for kind, sums in exchanged},
    'collective_bytes': {k: v.bytes for k, v in total.collectives.items()},
    'collective_seconds': _plain(total.collectives),
    'exposed_collective_seconds': total.exposed_seconds,
    'kernels': _plain(total.kernels),
    'uncounted': _plain(dict(uncounted)),
  }
  if total.estimated_cycles is not None:
    changes['estimated_cycles'] = total.estimated_cycles or None
    changes['uncounted_cycles'] = round(total.uncounted_cycles)
    for sums in changes['uncounted'].values():
      sums['cycles'] = round(sums['cycles'])
  if seconds is not None and target.device is not None:
    batch, devices = planned.batch_size, planned.devices
    achieved = planned.model_flops_per_image * batch / seconds / devices
    days = seconds * planned.total_steps / SECONDS_PER_DAY
    cores = target.device.tpu.cores if target.device.tpu else 1
    changes |= {
      'predicted_images_per_second': batch / seconds,
      'predicted_mfu': achieved / target.device.peak_flops,
      'predicted_days': days,
      'predicted_core_days': days * devices * cores,
    }
  return dataclasses.replace(planned, **changes)


def _plain(sums: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  return {kind: dataclasses.asdict(each) for kind, each in sums.items()}


def default_cache() -> epath.Path:
  """Returns the directory of cached programs, which need not exist."""
  folder = os.environ.get('JAX_COMPILATION_CACHE_DIR')
  folder = folder or pathlib.Path.home() / '.cache/vit_jax/compiled'
  return epath.Path(folder) / 'plans'


def compile_step(
  experiment: Experiment,
  compiler_options: Mapping[str, Any],
  target: str,
  cache: epath.Path | None,
) -> Program:
  """Compiles the training step, unless the same step was compiled before.

  The step is the same if its traced program, the options, the devices and the
  versions of the compilers are.

  Args:
    experiment: experiment to compile.
    compiler_options: see `compiling.compile_step`.
    target: name of the devices.
    cache: directory of cached programs; None to compile in any case.
  """
  options = compiling.step_options(experiment, compiler_options)
  lowered = compiling.lower_step(experiment, options)
  path = None
  if cache is not None:
    path = cache / f'{_key(lowered.as_text(), target, options)}.json.gz'
    # A program that is missing or damaged is compiled.
    with contextlib.suppress(
      OSError, EOFError, zlib.error, ValueError, TypeError
    ):
      program = Program(**json.loads(gzip.decompress(path.read_bytes())))
      log.info('using the program that an earlier plan compiled: %s', path)
      return program
  log.info('compiling the training step')
  started = time.monotonic()
  compiled = lowered.compile()
  seconds = round(time.monotonic() - started, 1)
  text, sizes = compiled.as_text() or '', memory.program_bytes(compiled)
  program = Program(text, sizes, seconds)
  if path is not None:
    content = gzip.compress(json.dumps(program._asdict()).encode(), 1)
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      paths.write(path, content)
    except OSError as error:
      log.warning('the compiled program could not be cached: %s', error)
  return program


def _key(*values: Any) -> str:
  """Returns a hash of values, and of the compilers and their variables."""
  versions = sorted(
    f'{package.name} {package.version}'
    for package in importlib.metadata.distributions()
    if (package.name or '').startswith(_COMPILERS)
  )
  variables = [os.environ.get(name) for name in _VARIABLES]
  text = json.dumps([*values, versions, variables], sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()
