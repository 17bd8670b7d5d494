"""Recognizes, renames and removes the step directories of this program.

All other files in a directory of checkpoints belong to the user, and are never
changed. Of the steps of a run, the newest and the best by a metric are kept.
The metrics of a step are a separate item, `metrics/metrics`, because they may
be written after the step. The item is JSON with a checksum.
"""

import logging
import math
import os
import re
from typing import Any

from etils import epath

from vit_jax.checkpoint import agreement, items, manifest
from vit_jax.checkpoint.agreement import CorruptError
from vit_jax.errors import StorageError, UserError
from vit_jax.files import paths
from vit_jax.files.paths import is_remote

log = logging.getLogger('vit_jax')
_METRICS = 'metrics'  # name of the item, a directory, and of the file in it

_STEP = r'(?:0|[1-9][0-9]{0,8})'  # no leading zeros; a step is an int32
_METADATA = '_CHECKPOINT_METADATA'  # Orbax writes it to every step it begins
COMMITTED = 'commit_success.txt'  # on object stores, Orbax writes it last
_UNFINISHED = '.orbax-checkpoint-tmp'  # suffix until a step is committed


def parse_step(name: str) -> int | None:
  """Converts a directory name to a step; None for '000120', '²' or 'notes'."""
  return int(name) if re.fullmatch(_STEP, name) else None


def is_step_or_bad(name: str) -> bool:
  """Returns whether a name is that of a step or of a renamed damaged step."""
  return re.fullmatch(rf'{_STEP}(\.bad[0-9]*)?', name) is not None


def check_path(path: epath.Path) -> None:
  """Refuses paths that Orbax would interpret as glob patterns.

  Orbax finds the parts of a checkpoint by a glob pattern that contains the full
  path. If the pattern does not match, a save succeeds but cannot be restored.

  Args:
    path: directory of checkpoints.

  Raises:
    UserError: the path contains [, * or ?.
  """
  special = sorted(set('[*?') & set(str(path)))
  if special:
    raise UserError(
      f'{path} contains {" ".join(special)}: Orbax would interpret it as a '
      'pattern and lose data. Give a path without [, * and ?.'
    )


def listing(path: epath.Path) -> set[str]:
  """Returns the names in a directory; an empty set if it is not a directory.

  Raises:
    OSError: the directory cannot be listed.
  """
  try:
    return {entry.name for entry in path.iterdir()}
  except (FileNotFoundError, NotADirectoryError):
    return set()


def is_step(path: epath.Path) -> bool:
  """Returns whether a directory contains a step that was completely written.

  Two items of a step are sufficient to distinguish it from a directory of the
  user. The others may have been lost by damage.

  Args:
    path: directory.

  Raises:
    OSError: the directory cannot be listed.
  """
  names = listing(path)
  return len(names & set(items.NAMES)) >= 2 and (
    not is_remote(path) or COMMITTED in names
  )


def committed(root: epath.Path) -> list[int]:
  """Returns the steps in a directory, ascending.

  Args:
    root: directory of checkpoints.

  Raises:
    OSError: the directory cannot be listed.
  """
  steps = (parse_step(name) for name in listing(root))
  return sorted(
    step for step in steps if step is not None and is_step(root / str(step))
  )


def latest(root: epath.Path) -> int | None:
  """Returns the newest step in a directory; None if there is none.

  Raises:
    StorageError: the directory cannot be listed.
  """
  try:
    return max(committed(root), default=None)
  except OSError as error:
    raise StorageError(f'{root} cannot be listed: {error}.') from error


def remove_unfinished(root: epath.Path) -> None:
  """Removes the incomplete steps of saves that were killed or failed.

  Args:
    root: directory of checkpoints.

  Raises:
    OSError: a directory cannot be listed or removed.
  """
  for name in listing(root):
    if _is_unfinished(root / name):
      (root / name).rmtree()


def _is_unfinished(path: epath.Path) -> bool:
  """Returns whether a path is a step that was not completely written."""
  # A hidden name is that of a step that was being copied to begin a branch.
  pattern = rf'{_STEP}{re.escape(_UNFINISHED)}.*|\.{_STEP}\.\w{{8}}'
  if re.fullmatch(pattern, path.name):
    return path.is_dir() and not os.path.islink(path)
  if is_remote(path) and parse_step(path.name) is not None:
    # On object stores, an unfinished step has its final name.
    names = listing(path)
    return _METADATA in names and COMMITTED not in names
  return False


def check_writable(root: epath.Path, step: int) -> None:
  """Checks that a step can be written.

  If the disk is full or read-only, this raises one error. Otherwise each of the
  many threads that write arrays would raise one.

  Args:
    root: directory of checkpoints.
    step: number of updates completed.

  Raises:
    OSError: another directory has the name of the step, or the disk cannot be
      written.
  """
  path = root / str(step)
  names = listing(path)
  # On object stores, an unfinished step has its final name; it is overwritten.
  is_unfinished = is_remote(root) and _METADATA in names
  is_file = path.exists() and not path.is_dir()
  if is_file or (names and not is_unfinished):
    raise FileExistsError(
      f'{path} is not a checkpoint of this program, but has the name of the '
      'step to be saved; move it away'
    )
  if is_remote(root):
    return
  if path.exists():
    path.rmdir()  # it is empty
  trial = root / f'{step}{_UNFINISHED}'
  if trial.exists():
    trial.rmtree()
  trial.mkdir()
  (trial / 'trial').write_bytes(bytes(4096))
  trial.rmtree()


def remove(root: epath.Path, step: int) -> None:
  """Deletes a step.

  Args:
    root: directory of checkpoints.
    step: step to delete.
  """
  # The commit file, or the name of the directory, is removed first: if the
  # process is killed meanwhile, the remaining files are not taken for a step.
  path = root / str(step)
  if is_remote(root):
    (path / COMMITTED).unlink()
  else:
    path = path.rename(root / f'{step}{_UNFINISHED}-removed')
  path.rmtree()


def quarantine(root: epath.Path, step: int) -> None:
  """Renames a damaged step to `<step>.bad`, which is never restored.

  The name is `<step>.bad1` and so on if it is taken.

  Args:
    root: directory of checkpoints.
    step: damaged step.
  """
  target, attempt = root / f'{step}.bad', 1
  while target.exists():
    target, attempt = root / f'{step}.bad{attempt}', attempt + 1
  (root / str(step)).rename(target)


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
  folder = step_dir / _METRICS
  if _METRICS in listing(folder):
    return
  folder.mkdir(exist_ok=True)
  content = manifest.text_with_checksum({'step': step, **metrics})
  paths.write(folder / _METRICS, content)


def remove_old(
  root: epath.Path, run: str, keep: int, best: str | None, sign: int
) -> None:
  """Removes the run's steps that are neither among the newest nor the best.

  A step whose manifest or metrics cannot be read is kept. Failures are only
  logged, because the step that was just saved is already committed.

  Args:
    root: directory of checkpoints.
    run: id of the run; steps of other runs are kept.
    keep: number of newest steps to keep.
    best: name of the metric whose best step is kept, too.
    sign: -1 if lower values of the metric are better.
  """
  try:
    ours = [s for s in committed(root) if _is_ours(root / str(s), run)]
    kept = set(ours[-keep:])
    if best is not None:
      found, unreadable = best_step(root, ours, best, sign)
      if found is not None:
        kept.add(found[0])
      for step, error in unreadable.items():
        log.warning(
          '%s is kept, because it may be the best step: %s',
          root / str(step),
          error,
        )
        kept.add(step)
    for step in ours:
      if step not in kept:
        remove(root, step)
  except Exception as error:  # noqa: BLE001 (file systems raise many types)
    log.warning(
      'old steps in %s could not be removed: %s',
      root,
      agreement.root_cause(error),
    )


def _is_ours(step_dir: epath.Path, run: str) -> bool:
  """Returns whether this run wrote a step, according to its manifest."""
  try:
    return manifest.read(step_dir).run == run
  except CorruptError as error:
    log.warning('%s is kept; its manifest is damaged: %s', step_dir, error)
    return False


def best_step(
  root: epath.Path, candidates: list[int], name: str, sign: int
) -> tuple[tuple[int, float] | None, dict[int, CorruptError]]:
  """Returns the step whose metric is the best, and the metric.

  Args:
    root: directory of checkpoints.
    candidates: steps to choose from.
    name: name of the metric.
    sign: -1 if lower values are better.

  Returns:
    (step, metric), with the later step if metrics are equal, or None if no step
    has the metric; and the errors of steps with damaged metrics, by step.
  """
  values, unreadable = [], {}
  for step in candidates:
    try:
      value = read_metrics(root / str(step)).get(name)
    except CorruptError as error:
      unreadable[step] = error
      continue
    if isinstance(value, int | float) and math.isfinite(value):
      values.append((value, step))
  if not values:
    return None, unreadable
  value, step = max(values, key=lambda pair: (sign * pair[0], pair[1]))
  return (step, value), unreadable


def read_metrics(step_dir: epath.Path) -> dict[str, Any]:
  """Reads the metrics of a step; {} if the step was not evaluated.

  Args:
    step_dir: step directory.

  Raises:
    CorruptError: the checksum of the metrics is wrong.
  """
  if _METRICS not in listing(step_dir / _METRICS):
    return {}
  content = items.read_json(step_dir / _METRICS, _METRICS)
  return manifest.verified(content, str(step_dir / _METRICS))
