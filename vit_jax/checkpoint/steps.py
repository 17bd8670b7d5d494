"""Recognizes, renames and removes the step directories of this program.

All other files in a directory of checkpoints belong to the user, and are never
changed.
"""

import os
import re

from etils import epath

from vit_jax.checkpoint import items
from vit_jax.errors import StorageError, UserError
from vit_jax.files.paths import is_remote

_STEP = r'(?:0|[1-9][0-9]{0,8})'  # no leading zeros; a step is an int32
_COMMITTED = 'commit_success.txt'  # on object stores, Orbax writes it last
_UNFINISHED = '.orbax-checkpoint-tmp'  # suffix until a step is committed


def number(name: str) -> int | None:
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
  found = sorted(set('[*?') & set(str(path)))
  if found:
    raise UserError(
      f'{path} contains {" ".join(found)}: Orbax, which writes the '
      'checkpoints, would interpret the path as a pattern and lose parts of '
      'them. Give a path without [, * and ?.'
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
    not is_remote(path) or _COMMITTED in names
  )


def committed(root: epath.Path) -> list[int]:
  """Returns the steps in a directory, ascending.

  Args:
    root: directory of checkpoints.

  Raises:
    OSError: the directory cannot be listed.
  """
  numbers = (number(name) for name in listing(root))
  return sorted(
    step for step in numbers if step is not None and is_step(root / str(step))
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


def numeric_non_steps(root: epath.Path) -> list[str]:
  """Returns the numeric names that are not steps, such as '000120'."""
  steps = {str(step) for step in committed(root)}
  return sorted(
    name for name in listing(root) - steps if name.strip().isnumeric()
  )


def remove_unfinished(root: epath.Path) -> None:
  """Removes the incomplete steps of saves that were killed or failed.

  Args:
    root: directory of checkpoints.

  Raises:
    OSError: a directory cannot be listed or removed.
  """
  for name in listing(root):
    path, is_ours = root / name, False
    if re.fullmatch(f'{_STEP}{re.escape(_UNFINISHED)}.*', name):
      is_ours = path.is_dir() and not os.path.islink(path)
    elif is_remote(root) and number(name) is not None:
      # On object stores, an unfinished step has its final name.
      names = listing(path)
      is_ours = '_CHECKPOINT_METADATA' in names and _COMMITTED not in names
    if is_ours:
      path.rmtree()


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
  if is_remote(root):
    names = listing(path)
    if names and '_CHECKPOINT_METADATA' not in names:
      raise _name_is_taken(path)
    return
  if path.exists():
    if not path.is_dir() or listing(path):
      raise _name_is_taken(path)
    path.rmdir()
  trial = root / f'{step}{_UNFINISHED}'
  if trial.exists():
    trial.rmtree()
  trial.mkdir()
  (trial / 'trial').write_bytes(bytes(4096))
  trial.rmtree()


def _name_is_taken(path: epath.Path) -> OSError:
  return FileExistsError(
    f'{path} is not a checkpoint of this program, but has the name of the step '
    'to be saved; move it away'
  )


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
    (path / _COMMITTED).unlink()
  else:
    path = path.rename(root / f'{step}{_UNFINISHED}-removed')
  path.rmtree()


def quarantine(root: epath.Path, step: int) -> epath.Path:
  """Renames a damaged step to `<step>.bad`, which is never restored.

  Args:
    root: directory of checkpoints.
    step: damaged step.

  Returns:
    The new path; `<step>.bad1` and so on if the name is taken.
  """
  target, attempt = root / f'{step}.bad', 1
  while target.exists():
    target, attempt = root / f'{step}.bad{attempt}', attempt + 1
  return (root / str(step)).rename(target)
