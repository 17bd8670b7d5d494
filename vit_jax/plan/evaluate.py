"""Compiles a config's training step for one topology, and adds up its costs."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from vit_jax.arrays import memory, tree
from vit_jax.config import durations
from vit_jax.config.completion import Config
from vit_jax.plan import cost, gpu_cost, gpus, hlo, programs
from vit_jax.plan.topology import Target
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
SECONDS_PER_DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Plan:
  """Costs of the compiled program of one config.

  Attributes:
    config: config that was compiled.
    result: values that `--json` prints, see `_initial_result`.
    cost: costs of the compiled program; None if it was not compiled, or if the
      compiler refuses it because it is too large.
    text: optimized HLO; '' if the program was refused or not compiled.
  """

  config: Config
  result: dict[str, Any]
  cost: cost.Cost | gpu_cost.GpuCost | None
  text: str = ''

  @property
  def fits(self) -> bool:
    """True if the program fits in a device's memory."""
    return self.result['fits']

  @property
  def seconds(self) -> float:
    """Predicted time of a step in seconds; infinite if it is unknown."""
    return self.result['predicted_step_seconds'] or float('inf')


def changed(config: Config, **changes: Any) -> Config:
  """Returns a changed copy of a config; '__' in a keyword stands for '.'."""
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
    state = experiment.abstract_state()
    result = _initial_result(experiment, state, target)
    if not target.compiles:
      bounds = _lower_bounds(experiment, result, target)
      return Plan(config, result | bounds, None)
    try:
      options = dict(gpus.COMPILER_OPTIONS if target.cluster else {})
      options |= compiler_options or {}
      program = programs.compile_step(experiment, options, target.name, cache)
    except jax.errors.JaxRuntimeError as error:
      needed = memory.needed_bytes(str(error))
      if 'RESOURCE_EXHAUSTED' not in str(error) or needed is None:
        raise
      result['peak_bytes_per_device'] = needed
      result['bytes']['temporaries'] = needed
      return Plan(config, result, None)
  result['compile_seconds'] = program.compile_seconds
  text = program.text
  if program.bytes is not None:
    result['peak_bytes_per_device'] = program.bytes.pop('peak')
    result['bytes'] |= program.bytes
  limit, peak = target.hbm_bytes, result['peak_bytes_per_device']
  result['fits'] = limit is None or peak is None or peak <= limit
  module = hlo.parse(text)
  if target.cluster is not None:
    total = gpu_cost.of_program(module, target.cluster)
    modelled = _on_gpus(experiment, module, total, target.cluster)
    return Plan(config, result | modelled, total, text)
  total = cost.of_program(module, target)
  return Plan(config, result | _on_tpus(experiment, total, target), total, text)


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


def _initial_result(
  experiment: Experiment, state: Any, target: Target
) -> dict[str, Any]:
  """Returns the values that do not depend on the compiled program.

  The result contains all keys, in the order of the report.
  """
  config = experiment.config
  sizes = {
    'parameters': memory.tree_bytes(state.params),
    'optimizer': memory.tree_bytes(state.opt_state),
    'average': memory.tree_bytes(state.average),
    'extra': memory.tree_bytes(state.extra),
    'batch': memory.tree_bytes(experiment.abstract_batch()),
  }
  return {
    'topology': target.name,
    'devices': len(target.devices),
    'parameters': tree.size(state.params),
    'fits': False,
    'peak_bytes_per_device': None,
    'hbm_bytes_per_device': target.hbm_bytes,
    'flops_per_device': None,
    'model_flops_per_image': experiment.image_flops,
    'predicted_step_seconds': None,
    'predicted_step_seconds_range': None,
    'uncertain_seconds': None,
    'predicted_mfu': None,
    'predicted_images_per_second': None,
    'total_steps': experiment.total_steps,
    'predicted_core_days': None,
    'collectives': {},
    'collective_bytes': {},
    'collective_seconds': {},
    'exposed_collective_seconds': None,
    'estimated_cycles': None,
    'uncounted_cycles': None,
    'uncounted': {},
    'kernels': {},
    'predicted_days': None,
    'least_days': None,
    'paper_core_days': config.paper_core_days,
    'batch_size': config.batch_size,
    'micro_batches': config.micro_batches,
    'images_per_device': config.batch_size / len(target.devices),
    'mesh': dict(experiment.mesh.shape),
    'remat': config.model.get('remat'),
    'unroll': config.model.get('unroll'),
    'computed_by': experiment.model.computed_by(experiment.image_size),
    'bytes': sizes,
  }


def _lower_bounds(
  experiment: Experiment, result: dict[str, Any], target: Target
) -> dict[str, Any]:
  """Returns lower bounds of memory and time for GPUs without a compiler."""
  assert target.hbm_bytes is not None and target.cluster is not None
  state_and_batch = sum(result['bytes'].values())
  flops = experiment.image_flops * experiment.config.batch_size
  cluster = target.cluster
  seconds = flops / cluster.devices / cluster.gpu.peak_flops
  return {
    'fits': state_and_batch <= target.hbm_bytes,
    'peak_bytes_per_device': state_and_batch,
    'least_days': seconds * experiment.total_steps / SECONDS_PER_DAY,
    'computed_by': None,  # unknown, because CPU devices stand for the GPUs
  }


def _on_gpus(
  experiment: Experiment,
  module: hlo.Module,
  total: gpu_cost.GpuCost,
  cluster: gpus.Cluster,
) -> dict[str, Any]:
  """Returns the costs of a program for GPUs, including its modelled time."""
  low, high = (
    gpu_cost.of_program(module, cluster, rates).total
    for rates in (gpu_cost.OPTIMISTIC, gpu_cost.PESSIMISTIC)
  )
  kernels = {kind: dataclasses.asdict(v) for kind, v in total.parts.items()}
  peak, devices = cluster.gpu.peak_flops, cluster.devices
  return {
    **_exchanged(total.collectives),
    **_predictions(experiment, total.total, peak, devices),
    'flops_per_device': total.matrix_flops,
    'kernels': kernels,
    'exposed_collective_seconds': total.exposed_seconds,
    'predicted_step_seconds_range': [low, high],
  }


def _on_tpus(
  experiment: Experiment, total: cost.Cost, target: Target
) -> dict[str, Any]:
  """Returns the costs of a program for TPUs, or for this machine.

  The time of a step is predicted only if the compiler estimates cycles.
  """
  uncounted = {
    kind: dataclasses.asdict(v) | {'cycles': round(v.cycles)}
    for kind, v in sorted(
      total.uncounted.items(), key=lambda item: -item[1].cycles
    )
  }
  result = {
    **_exchanged(total.collectives),
    'estimated_cycles': total.estimated_cycles or None,
    'flops_per_device': total.matrix_flops,
    'uncounted_cycles': round(total.uncounted_cycles),
    'uncounted': uncounted,
  }
  chip, devices = target.chip, len(target.devices)
  if chip is None or not total.estimated_cycles:
    return result
  cycles = total.estimated_cycles + total.uncounted_cycles
  seconds = cycles / chip.clock_hz + total.exposed_seconds
  uncertain = total.uncertain_seconds(chip.clock_hz)
  result |= {
    'exposed_collective_seconds': total.exposed_seconds,
    'uncertain_seconds': uncertain,
    'predicted_step_seconds_range': [
      seconds + sum(limits) for limits in zip(*uncertain.values(), strict=True)
    ],
  }
  return result | _predictions(
    experiment, seconds, chip.peak_flops, devices, chip.cores
  )


def _exchanged(collectives: dict[str, cost.Collective]) -> dict[str, Any]:
  """Returns numbers, bytes and times of the collectives of a step, by kind."""
  return {
    'collectives': {k: v.count for k, v in sorted(collectives.items())},
    'collective_bytes': {k: v.bytes for k, v in collectives.items()},
    'collective_seconds': {
      k: dataclasses.asdict(v) for k, v in collectives.items()
    },
  }


def _predictions(
  experiment: Experiment,
  seconds: float,
  peak_flops: float,
  devices: int,
  cores: int = 1,
) -> dict[str, Any]:
  """Returns the predictions that follow from the time of a step.

  Args:
    experiment: experiment that is planned.
    seconds: predicted time of a step.
    peak_flops: peak FLOP/s of a device.
    devices: number of devices.
    cores: number of cores of a device, for core-days.
  """
  batch = experiment.config.batch_size
  achieved = experiment.image_flops * batch / seconds / devices
  days = seconds * experiment.total_steps / SECONDS_PER_DAY
  return {
    'predicted_step_seconds': seconds,
    'predicted_images_per_second': batch / seconds,
    'predicted_mfu': achieved / peak_flops,
    'predicted_days': days,
    'predicted_core_days': days * devices * cores,
  }
