"""Compiles the training step ahead of time, and logs what is about to run."""

import logging
from typing import Any

import jax

from vit_jax.arrays import sharding
from vit_jax.training import frozen
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
PyTree = Any


def compile_step(experiment: Experiment) -> jax.stages.Compiled:
  """Compiles `Trainer.train_step` for the experiment's mesh, ahead of time.

  The state is donated. A compiled step accepts only these shapes and
  shardings, so it is never recompiled unnoticed.
  """
  state = experiment.abstract_state()
  everywhere = sharding.replicated(experiment.mesh)
  devices = experiment.mesh.devices.flatten()
  step = jax.jit(
    experiment.trainer.train_step,
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), everywhere),
    compiler_options=experiment.model.compiler_options(
      devices[0].platform, len(devices)
    ),
  )
  key = jax.eval_shape(lambda: jax.random.key(0)).update(sharding=everywhere)
  fixed = key, frozen.abstract(experiment.frozen, experiment.mesh)
  log.info('compiling the training step')
  return step.lower(state, experiment.abstract_batch(), *fixed).compile()


def describe(experiment: Experiment, abstract: PyTree) -> None:
  """Logs what is about to run.

  The table of parameters only where one is split or `log.parameters` is set.
  """
  config, mesh = experiment.config, experiment.mesh
  devices = mesh.devices
  params = abstract.params
  whole = config.log.parameters or sharding.is_split(params)
  log.info('%s', sharding.table(params) if whole else sharding.total(params))
  log.info(
    'mesh %s of %d %s device(s) on %d process(es)',
    'x'.join(f'{axis}={n}' for axis, n in mesh.shape.items()),
    devices.size,
    devices.flat[0].device_kind,
    jax.process_count(),
  )
  log.info(
    '%d steps (%s) of batch %d, %d examples an epoch, %dx%d pixels, %s; '
    '%.3g GFLOPs an image (forward and backward), %s',
    experiment.total_steps,
    config.total,
    config.batch_size,
    config.train.num_examples,
    *experiment.image_size,
    config.model.get('dtype') or config.model.name,
    experiment.image_flops / 1e9,
    experiment.model.computed_by(experiment.image_size),
  )
