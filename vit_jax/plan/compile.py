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
import numpy as np
from etils import epath

from vit_jax.arrays import memory, tree
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

  `--json` prints these values except config and text, and also the values of
  the cost, see `to_dict`. None
  means that a value is unknown, or does not exist for these devices. Values per
  device are those of one JAX device.

  Attributes:
    config: config that was compiled.
    topology: name of the devices.
    devices: number of devices.
    parameters: number of parameters.
    hbm_bytes_per_device: memory that a program may use.
    model_flops_per_image: FLOPs of forward and backward pass of the model.
    total_steps: number of steps of the training.
    paper_core_days: TPUv3 core-days that the paper reports.
    batch_size: number of images of a step.
    micro_batches: number of parts into which a batch is divided.
    images_per_device: number of images of a step per device.
    mesh: sizes of the axes of the mesh.
    remat: rematerialization policy of the model.
    unroll: number of layers that are unrolled.
    computed_by: parts of the model with special kernels.
    bytes: memory per device by use.
    fits: whether the program fits in a device's memory.
    peak_bytes_per_device: memory that the program needs.
    text: optimized HLO; '' if the program was refused.
    compile_seconds: time of the compilation.
    cost: costs of the compiled program.
    predicted_mfu: model FLOPs per second, as a fraction of the peak rate.
    predicted_images_per_second: images per second on all devices.
    predicted_days: days of the whole training.
    predicted_core_days: days of TensorCores or GPUs for the whole training.
  """

  config: Config
  topology: str
  devices: int
  parameters: int
  hbm_bytes_per_device: int | None
  model_flops_per_image: float
  total_steps: int
  paper_core_days: float | None
  batch_size: int
  micro_batches: int
  images_per_device: float
  mesh: dict[str, int]
  remat: str | None
  unroll: int | None
  computed_by: str | None
  bytes: dict[str, int]
  fits: bool = False
  peak_bytes_per_device: int | None = None
  text: str = ''
  compile_seconds: float | None = None
  cost: Cost = Cost()
  predicted_mfu: float | None = None
  predicted_images_per_second: float | None = None
  predicted_days: float | None = None
  predicted_core_days: float | None = None

  @property
  def seconds(self) -> float:
    """Predicted time of a step in seconds; infinite if it is unknown."""
    return self.cost.predicted_step_seconds or float('inf')

  def to_dict(self) -> dict[str, Any]:
    """Returns the values that `--json` prints."""
    values = vars(self) | vars(self.cost)
    for name in ('config', 'text', 'cost', 'groups'):
      del values[name]
    for name, key in (('collectives', 'count'), ('collective_bytes', 'bytes')):
      sums = self.cost.collective_seconds
      values[name] = {kind: sums[kind][key] for kind in sums}
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

  If batches have several sizes, a step is compiled for each. Memory and
  breakdown are those of the step with the largest memory, times are means.

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
  experiment = Experiment.build(config, target.devices)
  probabilities, variants = zip(*experiment.variants, strict=True)
  plans = [_plan(each, target, compiler_options, cache) for each in variants]
  largest = max(plans, key=lambda each: each.peak_bytes_per_device or 0)
  if len(plans) == 1 or not all(each.fits for each in plans):
    return largest
  cost = largest.cost
  if cost.predicted_step_seconds_range is not None:
    times = [
      (each.seconds, *(each.cost.predicted_step_seconds_range or ()))
      for each in plans
    ]
    means = np.average(times, axis=0, weights=probabilities)
    seconds, low, high = means.tolist()
    cost = dataclasses.replace(
      cost,
      predicted_step_seconds=seconds,
      predicted_step_seconds_range=(low, high),
    )
  planned = dataclasses.replace(
    largest, cost=cost, model_flops_per_image=experiment.image_flops
  )
  return _with_times(planned, target)


def _plan(
  experiment: Experiment,
  target: Target,
  compiler_options: Mapping[str, Any] | None,
  cache: epath.Path | None,
) -> Plan:
  """Returns the plan of an experiment whose batches have one size.

  If the compiler refuses the program because it needs too much memory, the plan
  has neither text nor cost.
  """
  with jax.set_mesh(experiment.mesh):
    planned = _without_program(experiment, target)
    is_absent_gpu = target.on_gpus and not target.is_local
    options = dict(GPU_OPTIONS if is_absent_gpu else {})
    options |= compiler_options or {}
    try:
      program = compile_step(experiment, options, target.name, cache)
    except jax.errors.JaxRuntimeError as error:
      needed = memory.needed_bytes(str(error))
      if needed is None:
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
    cost=cost_of(program.text, target),
  )
  return _with_times(planned, target)


def _with_times(planned: Plan, target: Target) -> Plan:
  """Adds values that follow from the predicted time of a step."""
  seconds, device = planned.cost.predicted_step_seconds, target.device
  if seconds is None or device is None:
    return planned
  batch, devices = planned.batch_size, planned.devices
  achieved = planned.model_flops_per_image * batch / seconds / devices
  days = seconds * planned.total_steps / SECONDS_PER_DAY
  return dataclasses.replace(
    planned,
    predicted_mfu=achieved / device.peak_flops,
    predicted_images_per_second=batch / seconds,
    predicted_days=days,
    predicted_core_days=days * devices * device.cores,
  )


def cost_of(text: str, target: Target) -> Cost:
  """Returns the cost of a step, given as optimized HLO, on a device."""
  model = gpu_cost if target.on_gpus else tpu_cost
  return model.of_program(hlo.parse(text), target)


def _without_program(experiment: Experiment, target: Target) -> Plan:
  """Returns a plan with the values that do not depend on the program."""
  config, state = experiment.config, experiment.abstract_state
  arrays = {
    'parameters': state.params,
    'optimizer': state.opt_state,
    'average': state.average,
    'extra': state.extra,
    'batch': experiment.abstract_batch(),
  }
  return Plan(
    config=config,
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
    bytes={use: memory.tree_bytes(leaves) for use, leaves in arrays.items()},
  )


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
  key = _key(lowered.as_text(), target, options)
  path = cache / f'{key}.json.gz' if cache is not None else None
  # A program that is missing, damaged or of another version is compiled.
  damage = OSError, EOFError, zlib.error, ValueError, TypeError
  with contextlib.suppress(*damage):
    if path is not None:
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
