"""What `plan` predicted for configs that come along, with what it was made of.

`benchmarks/plan_configs.py` writes the table, predicted.json of the configs: a
row takes minutes to compile. It holds for the config that it was made for, and
says so by a hash of the resolved config.
"""

import hashlib
import json
from typing import Any

from vit_jax.config import loading, shipped
from vit_jax.config.completion import Config, to_json
from vit_jax.errors import UserError

NAME = 'predicted.json'


def fingerprint(config: Config) -> str:
  """Twelve digits that change with any value of a resolved config."""
  return hashlib.sha256(to_json(config).encode()).hexdigest()[:12]


def read() -> list[dict[str, Any]]:
  """The table's rows, [] where there is none; see `plan_configs.py`."""
  file = shipped.directory() / NAME
  return json.loads(file.read_text()) if file.exists() else []


def line(row: dict[str, Any]) -> str:
  """Of text: what was planned, where, at which cost."""
  arguments = row['config'].partition(':')[2]
  what = f'{arguments} on {row["topology"]}' if arguments else row['topology']
  if not _current(row):
    return f'  {what}: planned for an older config, ask plan again'
  if row['core_days'] is None:
    return f'  {what}: does not fit'
  return (
    f'  {what}: {row["core_days"]:,.0f} core-days, {row["mfu"]:.0%} MFU, '
    f'{row["images_per_second"]:,.0f} images/s, {row["gib"]:.1f} GiB a device '
    f'({row["date"]}, libtpu {row["libtpu"]})'
  )


def _current(row: dict[str, Any]) -> bool:
  """Whether the config is the one that was planned."""
  try:
    return fingerprint(loading.load(row['config'])) == row['hash']
  except UserError:  # such a config is no longer there
    return False
