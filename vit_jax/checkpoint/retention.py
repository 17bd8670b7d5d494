"""Which steps of a run stay: the newest, and the best by a metric.

A step's metric is an item of its own, which may be written later than the step:
`metrics/metrics`, JSON with a checksum of its own.
"""

import logging
import math
from typing import Any

from etils import epath

from vit_jax.checkpoint import items, manifest, steps
from vit_jax.checkpoint.items import CorruptError

log = logging.getLogger('vit_jax')
_ITEM = _FILE = 'metrics'


def metrics_item(step: int, metrics: dict[str, float]) -> dict[str, Any]:
  """What is written of a step's metrics."""
  return manifest.sealed({'step': step, **metrics})


def add_metrics(
  step_dir: epath.Path, step: int, metrics: dict[str, float]
) -> None:
  """Writes the metrics of a step that was saved before it was evaluated.

  Raises:
    OSError: they cannot be written.
  """
  folder = step_dir / _ITEM
  if _FILE in steps.listing(folder):
    return
  folder.mkdir(exist_ok=True)
  beside = folder / f'{_FILE}.new'
  beside.write_text(manifest.sealed_text({'step': step, **metrics}))
  beside.replace(folder / _FILE)


def apply(root: epath.Path, run: str, keep: int, best: str | None) -> None:
  """Removes the run's steps that are neither new nor the best.

  A step that cannot be judged stays. Nothing here fails a save: it is
  committed by now.
  """
  try:
    ours = [s for s in steps.committed(root) if _is_ours(root / str(s), run)]
    stay = set(ours[-keep:])
    if best is not None:
      stay |= _best(root, ours, best)
    for step in ours:
      if step not in stay:
        steps.remove(root, step)
  except Exception as error:  # noqa: BLE001 (whatever a file system raises)
    log.warning(
      'old steps in %s could not be removed: %s', root, items.root_cause(error)
    )


def _is_ours(step_dir: epath.Path, run: str) -> bool:
  """Whether this run wrote a step, as far as its manifest says."""
  try:
    return manifest.read(step_dir).run in (None, run)
  except CorruptError as error:
    log.warning('%s stays, whose manifest is damaged: %s', step_dir, error)
    return False


def _best(root: epath.Path, ours: list[int], name: str) -> set[int]:
  """The step of the highest metric, and those of which it is unreadable."""
  values, unknown = [], set()
  for step in ours:
    try:
      value = metrics(root / str(step)).get(name)
    except CorruptError as error:
      log.warning('%s stays, best or not: %s', root / str(step), error)
      unknown.add(step)
      continue
    if isinstance(value, int | float) and math.isfinite(value):
      values.append((value, step))
  return unknown | ({max(values)[1]} if values else set())


def metrics(step_dir: epath.Path) -> dict[str, Any]:
  """A step's metrics; none if it was not evaluated.

  Raises:
    CorruptError: they are not what was written.
  """
  if _FILE not in steps.listing(step_dir / _ITEM):
    return {}
  content = items.read_json(step_dir / _ITEM, _FILE)
  if len(content) == 1:
    return content  # before format 3, without a checksum
  return manifest.unsealed(content, str(step_dir / _ITEM))
