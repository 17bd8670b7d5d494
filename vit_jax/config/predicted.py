"""Reads the costs that `plan` has predicted for the shipped configs.

`benchmarks/plan_configs.py` writes the table, configs/predicted.json. This
takes minutes per row, because the step is compiled. A row contains a hash of
the keys that determine the compiled program and its cost; the row is valid as
long as the config has the same hash.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import FrozenConfigDict

from vit_jax.config import loading, schema
from vit_jax.config.schema import Config
from vit_jax.errors import UserError

NAME = 'predicted.json'
# These keys and sections determine the program of a step. Data, evaluation,
# logging and checkpoints do not; of the augmentation, only the number and sizes
# of crops do.
_KEYS = (
  'total',
  'batch_size',
  'micro_batches',
  'image_size',
  'num_classes',
  'average_decay',
)
_SECTIONS = ('mix', 'model', 'objective', 'optimizer', 'schedule', 'mesh')
# Initial values of parameters do not change the step, and other units of the
# pixels change the cycles of DeiT S by 0.05 %.
_WITHOUT_COST = ('start_values', 'head_bias', 'pixels')
_PARTS = {
  'train': ('num_examples', 'repeats'),
  'augment': ('local_crops', 'local_size'),
}


def fingerprint(config: Config) -> str:
  """Returns a hash of the keys that determine the program of a step.

  In `_SECTIONS`, keys with their default value are left out, at every depth, so
  that adding a key with a default does not invalidate older rows.

  Args:
    config: completed config.

  Returns:
    Twelve hexadecimal digits.
  """
  values = config.to_dict()
  kept = {key: values[key] for key in _KEYS}
  for section in _SECTIONS:
    kept[section] = {
      key: value
      for key, value in _changed(schema.MARKS[section], values[section]).items()
      if key not in _WITHOUT_COST
      and (key, value) != ('name', schema.DEFAULT_NAMES.get(section))
    }
  for section, keys in _PARTS.items():
    kept[section] = {key: values[section].get(key) for key in keys}
  # These exist in some augmentations only, and are left out if they are not
  # set, so that older rows stay valid.
  for key in ('gram_scale', 'sizes'):
    if value := values['augment'].get(key):
      kept['augment'][key] = value
  if values['lora']['rank']:
    kept['lora'] = values['lora']
  text = json.dumps(kept, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def _changed(mark: schema.Nested, values: Any) -> dict[str, Any]:
  """Returns the values of a section that are not the defaults.

  Args:
    mark: mark of the section, which determines its defaults.
    values: values of the completed section.
  """
  keys, changed = mark.keys(values.get('name', '')), {}
  for key, value in values.items():
    if key not in keys:  # `name`, which selects the constructor
      changed[key] = value
      continue
    default, nested = keys[key].default, schema.nested(keys[key].annotation)
    if nested and value and not nested.many:
      value = _changed(nested, value)
      if isinstance(default, Mapping | FrozenConfigDict):
        default = dict(default)
    if not _equal(value, default):
      changed[key] = value
  return changed


def _equal(value: Any, default: Any) -> bool:
  """Returns whether a value, possibly from a JSON file, is the default."""
  return json.dumps(value) == json.dumps(default, default=str)


def read() -> list[dict[str, Any]]:
  """Returns the rows of the table; [] if the file does not exist."""
  file = loading.directory() / NAME
  return json.loads(file.read_text()) if file.exists() else []


def line(row: dict[str, Any]) -> str:
  """Returns a row as text: the config's arguments, topology and cost."""
  arguments = row['config'].partition(':')[2]
  run = f'{arguments} on {row["topology"]}' if arguments else row['topology']
  if not is_current(row):
    return f'  {run}: the config has changed since it was planned; run plan'
  if row['core_days'] is None:
    return f'  {run}: does not fit'
  unit = 'core-days' if row['compiler'].startswith('libtpu') else 'GPU-days'
  return (
    f'  {run}: {days(row)} {unit}, {row["mfu"]:.0%} MFU, '
    f'{row["images_per_second"]:,.0f} images/s, {row["gib"]:.1f} GiB per '
    f'device ({row["date"]}, {row["compiler"]})'
  )


def days(row: dict[str, Any]) -> str:
  """Returns the days of TensorCores or GPUs, with two digits at least."""
  return f'{row["core_days"]:,.{0 if row["core_days"] >= 10 else 1}f}'


def is_current(row: dict[str, Any]) -> bool:
  """Returns whether the config of a row still has the hash of the row."""
  try:
    return fingerprint(loading.load(row['config'])) == row['hash']
  except UserError:  # the config no longer exists
    return False
