"""Compiles the training step ahead of time, and logs a summary of the run."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
from clu import parameter_overview

from vit_jax.arrays import memory, sharding, tree
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_key
from vit_jax.training import frozen
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
# XLA's CPU compiler would remove barriers (of `xla.stored` and of
# `jax.checkpoint`) before it fuses operations.
_OPTIONS = {'cpu': {'xla_disable_hlo_passes': 'cse_barrier_expander'}}
PyTree = Any


def compile_step(
  experiment: Experiment, compiler_options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
  """Compiles `Trainer.train_step` for the experiment's mesh, ahead of time.

  The state is donated. The compiled step accepts only the shapes and shardings
  that it was compiled for, so it is never recompiled silently.

  Args:
    experiment: experiment to compile; the devices of its mesh may be absent.
    compiler_options: XLA options, which take precedence over the model's.
  """
  log.info('compiling the training step')
  options = step_options(experiment, compiler_options)
  return lower_step(experiment, options).compile()


def step_options(
  experiment: Experiment, compiler_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns all XLA options of the training step; see `compile_step`."""
  devices = experiment.mesh.devices.flatten()
  platform = devices[0].platform
  own = experiment.model.compiler_options(platform, len(devices))
  return _OPTIONS.get(platform, {}) | own | dict(compiler_options or {})


def lower_step(
  experiment: Experiment, options: Mapping[str, Any]
) -> jax.stages.Lowered:
  """Traces the training step of `compile_step`, to be compiled later.

  Args:
    experiment: experiment to compile.
    options: result of `step_options`.
  """
  state = experiment.abstract_state
  replicated = sharding.replicated(experiment.mesh)
  step = jax.jit(
    experiment.trainer.train_step,
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), replicated),
    compiler_options=dict(options),
  )
  key = abstract_key().update(sharding=replicated)
  fixed = key, frozen.abstract(experiment.frozen, experiment.mesh)
  return step.lower(state, experiment.abstract_batch(), *fixed)


def compile_to_run(experiment: Experiment) -> jax.stages.Compiled:
  """Compiles the training step for the devices of this run.

  Args:
    experiment: experiment about to run.

  Raises:
    UserError: the step needs more memory than the devices have.
  """
  limit = memory.of_device(experiment.mesh.local_devices[0])
  try:
    compiled = compile_step(experiment)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    needed = memory.needed_bytes(str(error))
    raise _too_large(experiment, needed, limit) from error
  program = memory.program_bytes(compiled)
  if program is not None and limit is not None and program['peak'] > limit:
    raise _too_large(experiment, program['peak'], limit)
  return compiled


def _too_large(
  experiment: Experiment, needed: int | None, limit: int | None
) -> UserError:
  """Returns the error for a step that needs too much memory."""
  return UserError(
    f'The training step needs {memory.text(needed)} of memory per device, and '
    f'a device has {memory.text(limit)}. Set a larger micro_batches (now '
    f'{experiment.config.micro_batches}), or a smaller batch_size, image_size '
    'or model.'
  )


def describe(experiment: Experiment) -> None:
  """Logs parameters, mesh, length and FLOPs of a run that is about to start.

  The table of all parameters is logged only if one of them is sharded.

  Args:
    experiment: experiment about to run.
  """
  config, mesh = experiment.config, experiment.mesh
  params = experiment.abstract_state.params
  if any(
    not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params)
  ):
    table = parameter_overview.get_parameter_overview(
      params, include_stats='sharding'
    )
    log.info('%s', table)
  else:
    log.info('total %s parameters', f'{tree.size(params):,}')
  log.info(
    'mesh %s of %d %s device(s) on %d process(es)',
    'x'.join(f'{axis}={n}' for axis, n in mesh.shape.items()),
    mesh.size,
    mesh.devices.flat[0].device_kind,
    jax.process_count(),
  )
  height, width = experiment.image_size
  # A model of a user may have no key for the dtype of its activations.
  dtype = config.model.get('dtype') or config.model.name
  log.info(
    '%d steps (%s) of batch %d, %d examples per epoch, %dx%d pixels, %s; '
    '%.3g GFLOPs per image (forward and backward), %s',
    experiment.total_steps,
    config.total,
    config.batch_size,
    config.train.num_examples,
    height,
    width,
    dtype,
    experiment.image_flops / 1e9,
    # The kernels that compute attention, or XLA.
    experiment.model.computed_by(experiment.image_size),
  )
