"""Removes old steps of a run; keeps the newest, and the best by a metric.

The metrics of a step are a separate item, `metrics/metrics`, because they may
be written after the step. The item is JSON with a checksum.
"""

import logging
import math
from typing import Any

from etils import epath

from vit_jax.checkpoint import items, manifest, steps
from vit_jax.checkpoint.items import CorruptError
from vit_jax.files import atomic

log = logging.getLogger('vit_jax')
_ITEM = _FILE = 'metrics'


def metrics_item(step: int, metrics: dict[str, float]) -> dict[str, Any]:
  """Returns the content of the item `metrics` of a step."""
  return manifest.with_checksum({'step': step, **metrics})


def add_metrics(
  step_dir: epath.Path, step: int, metrics: dict[str, float]
) -> None:
  """Writes the metrics of a step that was saved before it was evaluated.

  Args:
    step_dir: step directory.
    step: number of updates completed.
    metrics: metrics by name.

  Raises:
    OSError: the metrics cannot be written.
  """
  folder = step_dir / _ITEM
  if _FILE in steps.listing(folder):
    return
  folder.mkdir(exist_ok=True)
  content = manifest.text_with_checksum({'step': step, **metrics})
  atomic.write(folder / _FILE, content)


def apply(root: epath.Path, run: str, keep: int, best: str | None) -> None:
  """Removes the run's steps that are neither among the newest nor the best.

  A step whose manifest or metrics cannot be read is kept. Failures are only
  logged, because the step that was just saved is already committed.

  Args:
    root: directory of checkpoints.
    run: id of the run; steps of other runs are kept.
    keep: number of newest steps to keep.
    best: name of the metric whose best step is kept, too.
  """
  try:
    ours = [s for s in steps.committed(root) if _is_ours(root / str(s), run)]
    kept = set(ours[-keep:])
    if best is not None:
      found, unreadable = best_step(root, ours, best)
      kept |= {found[0]} if found else set()
      for step, error in unreadable.items():
        log.warning(
          '%s is kept, because it may be the best step: %s',
          root / str(step),
          error,
        )
        kept.add(step)
    for step in ours:
      if step not in kept:
        steps.remove(root, step)
  except Exception as error:  # noqa: BLE001 (file systems raise many types)
    log.warning(
      'old steps in %s could not be removed: %s', root, items.root_cause(error)
    )


def _is_ours(step_dir: epath.Path, run: str) -> bool:
  """Returns whether this run wrote a step, according to its manifest."""
  try:
    return manifest.read(step_dir).run in (None, run)
  except CorruptError as error:
    log.warning('%s is kept; its manifest is damaged: %s', step_dir, error)
    return False


def best_step(
  root: epath.Path, candidates: list[int], name: str
) -> tuple[tuple[int, float] | None, dict[int, CorruptError]]:
  """Returns the step whose metric is highest, and the metric.

  Args:
    root: directory of checkpoints.
    candidates: steps to choose from.
    name: name of the metric.

  Returns:
    (step, metric), with the later step if metrics are equal, or None if no step
    has the metric; and the errors of steps with damaged metrics, by step.
  """
  values, unreadable = [], {}
  for step in candidates:
    try:
      value = metrics(root / str(step)).get(name)
    except CorruptError as error:
      unreadable[step] = error
      continue
    if isinstance(value, int | float) and math.isfinite(value):
      values.append((value, step))
  if not values:
    return None, unreadable
  value, step = max(values)
  return (step, value), unreadable


def metrics(step_dir: epath.Path) -> dict[str, Any]:
  """Reads a step's metrics; {} if the step was not evaluated.

  Args:
    step_dir: step directory.

  Raises:
    CorruptError: the checksum of the metrics is wrong.
  """
  if _FILE not in steps.listing(step_dir / _ITEM):
    return {}
  content = items.read_json(step_dir / _ITEM, _FILE)
  if len(content) == 1:
    return content  # before format 3, without a checksum
  return manifest.verified(content, str(step_dir / _ITEM))
