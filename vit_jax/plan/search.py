"""Searches for a mesh, micro-batches and remat that fit, by compiling.

The TPU compiler needs seconds to refuse a program that is too large, but a
minute to compile one that fits. Large programs are therefore tried first.
"""

import itertools
import logging
from typing import Any

from vit_jax.arrays import memory
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.models.layers import REMAT
from vit_jax.plan.compile import Plan, changed, plan
from vit_jax.plan.topology import Target

log = logging.getLogger('vit_jax')
MAX_SPLITS = 3  # fitting micro-batch counts to try per mesh and remat policy
ALL_LAYERS = 1000  # value of model.unroll that unrolls all layers of any model


def _attempt(config: Config, target: Target) -> Plan:
  """Makes a plan; logs it before, because this can take minutes, and after."""
  log.info(
    'trying micro_batches=%d, remat=%s, unroll=%s, mesh %s',
    config.micro_batches,
    config.model.get('remat'),
    config.model.get('unroll'),
    {axis: config.mesh[axis] for axis in ('data', 'fsdp', 'model')},
  )
  attempt = plan(config, target)
  log.info(
    '%s: %s of %s per device',
    f'{attempt.seconds:.4g} s per step' if attempt.fits else 'does not fit',
    memory.text(attempt.peak_bytes_per_device),
    memory.text(attempt.hbm_bytes_per_device),
  )
  return attempt


def search(config: Config, target: Target) -> list[Plan]:
  """Finds settings with which a config's batch fits, cheapest first.

  For the config's mesh, and for one with fsdp instead of data (or data instead
  of fsdp), and for each remat policy, the smallest number of micro-batches that
  fits is planned, and up to `MAX_SPLITS - 1` larger ones while they are
  cheaper. Then the cheapest setting is planned with its layers unrolled, or
  with its layers scanned if they were unrolled.

  Raises:
    UserError: no setting fits.
  """
  found: list[Plan] = []
  other = {'mesh.data': 1, 'mesh.fsdp': -1}
  if config.mesh.fsdp == -1:
    other = {'mesh.data': -1, 'mesh.fsdp': 1}
  remats: list[dict[str, Any]] = [{}]
  if 'remat' in config.model:
    remats = [{'model.remat': name} for name in REMAT]
  # Powers of two that divide the images of a replica of the model.
  model_axis = config.mesh.model  # -1: the devices compute one model
  replicas = len(target.devices) // model_axis if model_axis > 0 else 1
  images = config.batch_size // replicas
  powers = [2**exponent for exponent in range(images.bit_length())]
  splits = [parts for parts in powers if images % parts == 0]
  for mesh, remat in itertools.product(({}, other), remats):
    fitting = []
    for parts in splits:
      changes = {**mesh, **remat, 'micro_batches': parts}
      planned = _attempt(changed(config, **changes), target)
      if not planned.fits:
        if fitting:
          break
        continue  # more micro-batches need less memory
      is_slower = fitting and planned.seconds >= fitting[-1].seconds
      fitting.append(planned)
      if is_slower or len(fitting) == MAX_SPLITS:
        break
    found += fitting
  if not found:
    raise UserError(
      f'No setting fits on {target.name}: use a batch_size below '
      f'{config.batch_size}, or more devices.'
    )
  best = min(found, key=lambda choice: choice.seconds)
  if 'unroll' in config.model:
    unroll = 1 if config.model.unroll > 1 else ALL_LAYERS
    changes = {'model.unroll': unroll}
    attempt = _attempt(changed(best.config, **changes), target)
    if attempt.fits:
      found.append(attempt)
  return sorted(found, key=lambda choice: choice.seconds)
