"""Predicts cost: python -m vit_jax.plan --config=FILE.py --topology=v3:4x4.

Compiles the training step of a config for TPUs or GPUs on a machine without
them, and prints memory, time and cost. Every key of the config is a flag.
"""

import json
import sys
from typing import Any

from absl import flags

from vit_jax.cli import entry
from vit_jax.config import overrides
from vit_jax.errors import UserError
from vit_jax.plan import gpus, report, search, topology
from vit_jax.plan.evaluate import Plan, plan


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string(
    'topology',
    None,
    'TPU slice in chips, such as v3:4x4; GPUs as NODESxGPUS, such as h100:4x8; '
    "or 'local' for this machine.",
  )
  flags.DEFINE_integer('slices', 1, 'Number of TPU slices.')
  flags.DEFINE_bool('json', False, 'Print one JSON object.')
  flags.DEFINE_bool('breakdown', False, 'Also print the ten costliest groups.')
  flags.DEFINE_bool(
    'search',
    False,
    'Also find the cheapest mesh, rematerialization and micro-batches for this '
    'batch, and the largest batch. Compiles 12 to 24 programs.',
  )
  flags.DEFINE_string('hlo', None, 'Write the optimized HLO to this file.')
  overrides.define_flag(sys.argv)


def main(arguments: list[str]) -> None:
  """Compiles the step and prints a JSON object or tables."""
  values = flags.FLAGS
  entry.refuse_arguments(arguments)
  if not values.topology:
    raise UserError(
      '--topology is needed: give a TPU slice in chips such as v3:4x4, GPUs '
      'such as h100:1x8, or local.'
    )
  target = topology.find(values.topology, values.slices)
  if values.search and not target.compiles:
    raise UserError(
      f'--search needs a compiler for {target.name}, which is not installed. '
      f'Install it by {gpus.EXTRA}, or omit --search.'
    )
  made = plan(values.config, target)
  result, tables = dict(made.result), []
  if values.search:
    result |= _searched(made, target, tables)
  elif not made.fits and target.compiles:
    result |= search.what_fits(values.config, target, made)
  if values.breakdown:
    result['breakdown'] = report.costliest(made)
    tables.append(report.breakdown(made))
  if values.hlo and made.text:
    with open(values.hlo, 'w') as file:
      file.write(made.text)
  if values.json:
    print(json.dumps(result))
  else:
    shown = Plan(made.config, result, made.cost)
    print('\n\n'.join([report.summary(shown), *tables]))


def _searched(
  made: Plan, target: topology.Target, tables: list[str]
) -> dict[str, Any]:
  """Returns the values that `--search` adds.

  Also appends its table to `tables`.
  """
  found = search.search(made.config, target)
  best = found[0]
  largest = search.largest_batch(best.config, target)
  keys = ('remat', 'unroll', 'micro_batches', 'mesh', 'peak_bytes_per_device')
  keys += ('predicted_step_seconds', 'predicted_mfu', 'estimated_cycles')
  tables.append('choices that fit, cheapest first\n' + report.choices(found))
  answer: dict[str, Any] = {
    'choices': [{key: each.result[key] for key in keys} for each in found]
  }
  if largest is not None:
    size = largest.config.batch_size
    answer['largest_batch_size'] = size
    answer['largest_images_per_device'] = size / len(target.devices)
    tables.append(
      f'largest batch with the first choice: {size} images, '
      f'{size / len(target.devices):g} per device'
    )
  return answer
