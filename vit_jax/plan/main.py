"""Predicts cost: python -m vit_jax.plan --config=FILE.py --topology=v3:4x4.

Compiles the training step of a config for TPUs or GPUs on a machine without
them, and prints memory, time and cost. Every key of the config is a flag.
"""

import json
import sys
from typing import Any

from absl import flags

from vit_jax.cli import process
from vit_jax.config import overrides
from vit_jax.errors import UserError
from vit_jax.plan import compile, report, search, topology
from vit_jax.weights import architecture


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
    'batch. Compiles 8 to 20 programs.',
  )
  flags.DEFINE_bool(
    'cache',
    True,
    'Use the program that an earlier plan of the same step compiled, from '
    '$JAX_COMPILATION_CACHE_DIR/plans or ~/.cache/vit_jax/compiled/plans.',
  )
  flags.DEFINE_float(
    'price',
    None,
    'Price of a device and hour in any currency; also prints the price of the '
    'training. A chip of TPU v2, v3 or tpu7x is two devices.',
    0,
  )
  overrides.define_flag(sys.argv)


def main(arguments: list[str]) -> None:
  """Compiles the step and prints a JSON object or tables.

  Raises:
    UserError: the config, the topology or a flag is invalid, or `--search`
      finds no setting that fits.
  """
  values = flags.FLAGS
  process.refuse_arguments(arguments)
  if not values.topology:
    raise UserError('--topology is missing: give v3:4x4, h100:1x8 or local.')
  target = topology.find(values.topology, values.slices)
  # Programs for this machine depend on its processor and are compiled quickly.
  is_cached = values.cache and not target.is_local
  cache = compile.default_cache() if is_cached else None
  config = architecture.complete(values.config)
  planned = compile.plan(config, target, cache=cache)
  added: dict[str, Any] = {}
  if values.search:
    choices = search.search(planned.config, target)
    added['choices'] = [
      {key: each.to_dict()[key] for key in report.CHOICE} for each in choices
    ]
  if values.breakdown:
    added['breakdown'] = report.costliest(planned)
  if values.price is not None:
    added['price_per_hour'] = values.price
    added['price'] = report.price(planned, values.price)
  summary = report.summary(planned, added)
  if values.json:
    summary = json.dumps(planned.to_dict() | added | {'summary': summary})
  print(summary)
