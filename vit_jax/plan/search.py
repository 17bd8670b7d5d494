"""Searches for a mesh, batch, micro-batches and remat that fit, by compiling.

The TPU compiler needs seconds to refuse a program that is too large, but a
minute to compile one that fits. The searches therefore try large programs
first, and use the bytes in the error to select the next size.
"""

import itertools
import logging
from typing import Any

from etils import epath

from vit_jax.arrays import memory
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.models.layers import REMAT
from vit_jax.plan.compile import STATE_AND_BATCH, Plan, changed, plan
from vit_jax.plan.topology import Target
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
MAX_TRIES = 8  # compilations to find the largest batch
MAX_FITS = 2  # compilations to find micro-batches that fit, after the first
SAFETY = 0.95  # part of the memory for which an estimate of micro-batches aims
MAX_SPLITS = 3  # fitting micro-batch counts to try per mesh and remat policy
ALL_LAYERS = 1000  # value of model.unroll that unrolls all layers of any model
GRANULARITY = 1 / 16  # relative accuracy of the largest batch


def _batch_parts(batch_size: int, devices: int) -> list[int]:
  """Returns all numbers of equal micro-batches that a batch can be split into.

  Args:
    batch_size: examples in a global batch.
    devices: number of devices that a batch is split over.
  """
  images = batch_size // devices
  return [k for k in range(1, images + 1) if images % k == 0]


def _split(config: Config, target: Target) -> int:
  """Returns the number of devices over which a batch is split."""
  model = config.mesh.model
  return len(target.devices) // model if model > 0 else 1


def _attempt(
  config: Config, target: Target, cache: epath.Path | None = None
) -> Plan:
  """Makes a plan; logs it before, because this can take minutes, and after."""
  log.info(
    'trying batch %d, micro_batches=%d, remat=%s, unroll=%s, mesh %s',
    config.batch_size,
    config.micro_batches,
    config.model.get('remat'),
    config.model.get('unroll'),
    {axis: config.mesh[axis] for axis in ('data', 'fsdp', 'model')},
  )
  attempt = plan(config, target, cache=cache)
  log.info(
    '%s: %s of %s per device',
    f'{attempt.seconds:.4g} s per step' if attempt.fits else 'does not fit',
    memory.text(attempt.peak_bytes_per_device),
    memory.text(attempt.hbm_bytes_per_device),
  )
  return attempt


def largest_batch(config: Config, target: Target) -> Plan | None:
  """Finds the largest batch that fits, with an accuracy of `GRANULARITY`.

  Args:
    config: completed config.
    target: devices to compile for.

  Returns:
    The plan of the largest batch; None if even one image per device and
    micro-batch does not fit.
  """
  unit = _split(config, target) * config.micro_batches
  best: Plan | None = None
  low, too_many = 0, None
  size = max(config.batch_size // unit, 1)  # images per device and micro-batch
  for _ in range(MAX_TRIES):
    # Huge batches take fewer steps than the warm-up, which changes only a
    # scalar of the compiled step.
    changes = {'batch_size': size * unit, 'schedule.warmup': '0 steps'}
    last = _attempt(changed(config, **changes), target)
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
  return best


def _guess(last: Plan, low: int, high: int, size: int) -> int:
  """Returns the next size to try, above `low` and below `high`."""
  middle = (low + high) // 2
  if not last.fits and low == 0:
    middle = min(int(size * _fitting_fraction(last)), high - 1)
  rounded = middle // 8 * 8 if middle >= 64 else middle
  return min(max(rounded, low + 1), high - 1)


def _fitting_fraction(refused: Plan) -> float:
  """Estimates which fraction of the images would fit; 0 if not even the state.

  What is not the state or the batch is taken as proportional to the images.
  """
  needed, limit = refused.peak_bytes_per_device, refused.hbm_bytes_per_device
  if needed is None or limit is None:
    return 0.0
  fixed = sum(refused.bytes[use] for use in STATE_AND_BATCH)
  return max(limit - fixed, 0) / max(needed - fixed, 1)


def find_fit(
  config: Config,
  target: Target,
  refused: Plan,
  cache: epath.Path | None = None,
) -> tuple[dict[str, Any], Plan] | None:
  """Finds micro-batches, if necessary with rematerialization, that fit.

  The number is estimated from the memory that the program needs, so at most
  `MAX_FITS` programs are compiled.

  Args:
    config: config that does not fit.
    target: devices to compile for.
    refused: plan of the config.
    cache: directory of compiled programs, see `compile.plan`.

  Returns:
    Changes of the config by key, and the plan of the changed config; None if no
    change that fits was found.
  """
  log.info(
    'the config does not fit: %s of %s per device; looking for micro-batches',
    memory.text(refused.peak_bytes_per_device),
    memory.text(refused.hbm_bytes_per_device),
  )

  def is_allowed(parts: int) -> bool:
    """Returns whether the sections of the config allow so many parts."""
    try:
      Experiment.build(changed(config, micro_batches=parts), target.devices)
    except UserError:
      return False
    return True

  splits = _batch_parts(config.batch_size, _split(config, target))
  last, changes = refused, {}
  for _ in range(MAX_FITS):
    fraction = SAFETY * _fitting_fraction(last)
    if not fraction:
      return None
    more = [k for k in splits if k > last.micro_batches]
    enough = (k for k in more if k * fraction >= last.micro_batches)
    parts = next(filter(is_allowed, enough), None)
    if parts is None:
      if last.remat in (None, 'full'):
        return None
      changes['model.remat'] = 'full'
      parts = next(filter(is_allowed, reversed(more)), last.micro_batches)
    changes['micro_batches'] = parts
    last = _attempt(changed(config, **changes), target, cache)
    if last.fits:
      return changes, last
  return None


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
  splits = _batch_parts(config.batch_size, _split(config, target))
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
