"""Searches for a mesh, batch, micro-batches and remat that fit, by compiling.

The TPU compiler needs seconds to refuse a program that is too large, but a
minute to compile one that fits. The searches therefore try large programs
first, and use the bytes in the error to select the next size.
"""

import itertools
import logging
from typing import Any

from etils import epath

from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.models.layers import REMAT
from vit_jax.plan.compile import Plan, changed, plan
from vit_jax.plan.topology import Target
from vit_jax.training.experiment import batch_parts

log = logging.getLogger('vit_jax')
MAX_TRIES = 8  # compilations to find the largest batch
MAX_SPLITS = 3  # fitting micro-batch counts to try per mesh and remat policy
ALL_LAYERS = 1000  # value of model.unroll that unrolls all layers of any model
GRANULARITY = 1 / 16  # relative accuracy of the largest batch


def _split(config: Config, target: Target) -> int:
  """Returns the number of devices over which a batch is split."""
  model = config.mesh.model
  return len(target.devices) // model if model > 0 else 1


def _attempt(
  config: Config, target: Target, cache: epath.Path | None = None
) -> Plan:
  """Makes a plan and logs it."""
  attempt = plan(config, target, cache=cache)
  log.info(
    'batch %d, micro_batches=%d, remat=%s, unroll=%s, mesh %s: %s',
    config.batch_size,
    config.micro_batches,
    attempt.remat,
    attempt.unroll,
    attempt.mesh,
    f'{attempt.seconds:.4g} s per step' if attempt.fits else 'does not fit',
  )
  return attempt


def largest_batch(
  config: Config,
  target: Target,
  refused: Plan | None = None,
  cache: epath.Path | None = None,
) -> Plan | None:
  """Finds the largest batch that fits, with an accuracy of `GRANULARITY`.

  Args:
    config: completed config.
    target: devices to compile for.
    refused: plan of this config if it is known not to fit, to save a
      compilation.
    cache: directory of compiled programs, see `compile.plan`.

  Returns:
    The plan of the largest batch; None if even one image per device and
    micro-batch does not fit.
  """
  unit = _split(config, target) * config.micro_batches
  best: Plan | None = None
  low, too_many = 0, None
  size = max(config.batch_size // unit, 1)  # images per device and micro-batch
  last = refused
  for _ in range(MAX_TRIES):
    if last is None:
      # Huge batches take fewer steps than the warm-up, which changes only a
      # scalar of the compiled step.
      changes = {'batch_size': size * unit, 'schedule.warmup': '0 steps'}
      last = _attempt(changed(config, **changes), target, cache)
    if last.fits:
      best, low = last, size
    else:
      too_many = size
    if too_many is None:
      size *= 2
    elif too_many - low <= max(1, low * GRANULARITY):
      break
    else:
      size = _guess(last, low, too_many, size)
    last = None
  return best


def _guess(last: Plan, low: int, high: int, size: int) -> int:
  """Returns the next size to try, above `low` and below `high`."""
  middle = (low + high) // 2
  needed, limit = last.peak_bytes_per_device, last.hbm_bytes_per_device
  if not last.fits and needed and limit and low == 0:
    sizes = last.bytes
    state = sizes['parameters'] + sizes['optimizer'] + sizes['average']
    fraction = max(limit - state, 0) / needed
    middle = min(int(size * fraction * 1.05), high - 1)
  rounded = middle // 8 * 8 if middle >= 64 else middle
  return min(max(rounded, low + 1), high - 1)


def find_fit(
  config: Config,
  target: Target,
  refused: Plan,
  cache: epath.Path | None = None,
) -> dict[str, Any]:
  """Finds the largest batch, and changes that make a config fit.

  Args:
    config: config that does not fit.
    target: devices to compile for.
    refused: plan of the config.
    cache: directory of compiled programs, see `compile.plan`.

  Returns:
    largest_batch_size; and changes_that_fit, {key: value}, if more
    micro-batches or full rematerialization make the config's batch fit. Both
    may be None.
  """
  try:
    largest = largest_batch(config, target, refused, cache)
  except UserError as error:  # a transform may not allow every size
    log.info('the search for the largest batch ends: %s', error)
    largest = None
  attempts: list[dict[str, Any]] = []
  if largest is not None:
    splits = batch_parts(config.batch_size, _split(config, target))
    max_images = largest.batch_size // config.micro_batches
    fitting = [k for k in splits if config.batch_size // k <= max_images]
    attempts += [{'micro_batches': k} for k in fitting[:2]]
  if config.model.get('remat') not in (None, 'full'):
    attempts.append({'model.remat': 'full'})
  that_fit = (
    changes
    for changes in attempts
    if _attempt(changed(config, **changes), target, cache).fits
  )
  return {
    'largest_batch_size': largest.batch_size if largest else None,
    'changes_that_fit': next(that_fit, None),
  }


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
  # Powers of two that divide a device's images.
  splits = batch_parts(config.batch_size, _split(config, target))
  splits = [parts for parts in splits if parts & (parts - 1) == 0]
  for mesh, remat in itertools.product(({}, other), remats):
    fitting = []
    for parts in splits:
      changes = {**mesh, **remat, 'micro_batches': parts}
      planned = _attempt(changed(config, **changes), target)
      is_slower = fitting and planned.seconds >= fitting[-1].seconds
      fitting += [planned] if planned.fits else []
      is_full = len(fitting) == MAX_SPLITS
      if fitting and (is_slower or is_full or not planned.fits):
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
    found += [attempt] if attempt.fits else []
  return sorted(found, key=lambda choice: choice.seconds)
