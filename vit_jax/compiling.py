"""The training step compiled ahead of time, and what is about to run."""

import logging
import os
from typing import Any

import jax

from vit_jax import sharding
from vit_jax.experiment import Experiment

log = logging.getLogger('vit_jax')
PyTree = Any

_DEFAULT_EXCHANGE, _EXCHANGE_A_DEVICE = 120 * 2**20, 128 * 2**10  # bytes


def compiler_options(
  platform: str, unroll: int, num_devices: int
) -> dict[str, str | int]:
  """What XLA is asked for: something on 'tpu', with `unroll` layers at a time.

  Layers that are written out one by one are the same code again and again: it
  is made once and called. Gradients are exchanged in parts that are alike from
  layer to layer too, and still 128 KiB for each device to pass on, beside which
  latency is small. Together: half the time to compile.

  An option that the user has set in $LIBTPU_INIT_ARGS is left to the user.
  """
  if platform != 'tpu' or unroll == 1:
    return {}
  part = min(num_devices * _EXCHANGE_A_DEVICE, _DEFAULT_EXCHANGE)
  options: dict[str, str | int] = {
    'xla_tpu_enable_deduplicated_calls': 'ENABLED',
    'xla_jf_crs_combiner_threshold_in_bytes': part,
  }
  users = os.environ.get('LIBTPU_INIT_ARGS', '')
  return {k: v for k, v in options.items() if k not in users}


def compile_step(experiment: Experiment) -> jax.stages.Compiled:
  """Compiles the training step for the experiment's mesh, ahead of time.

  The state is donated. A compiled step takes these shapes and shardings only,
  so nothing is ever compiled again unnoticed.
  """
  state = experiment.abstract_state()
  everywhere = sharding.replicated(experiment.mesh)
  devices = experiment.mesh.devices.flatten()
  step = jax.jit(
    experiment.trainer.train_step,
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), everywhere),
    compiler_options=compiler_options(
      devices[0].platform, getattr(experiment.model, 'unroll', 1), len(devices)
    ),
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere)
  log.info('compiling the training step')
  return step.lower(state, experiment.abstract_batch(), key).compile()


def describe(experiment: Experiment, abstract: PyTree) -> None:
  """Logs what is about to run."""
  config, mesh = experiment.config, experiment.mesh
  image_flops = experiment.model.forward_flops(experiment.image_size)
  devices = mesh.devices
  log.info('%s', sharding.table(abstract.params))
  log.info(
    'mesh %s of %d %s device(s) on %d process(es)',
    'x'.join(f'{axis}={n}' for axis, n in mesh.shape.items()),
    devices.size,
    devices.flat[0].device_kind,
    jax.process_count(),
  )
  log.info(
    '%d steps (%s) of batch %d, %d examples an epoch, %dx%d pixels, %s; '
    '%.3g GFLOPs an image (forward and backward)',
    experiment.total_steps,
    config.total,
    config.batch_size,
    config.train.num_examples,
    *experiment.image_size,
    config.model.dtype,
    3 * image_flops / 1e9,
  )
