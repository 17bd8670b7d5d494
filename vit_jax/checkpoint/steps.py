"""Which entries of a directory are steps, and which of them this program wrote.

Everything else in the directory is the user's, and stays as it is.
"""

import os
import re

from etils import epath

from vit_jax.checkpoint import items
from vit_jax.errors import StorageError, UserError
from vit_jax.files.paths import is_remote

_STEP = r'(?:0|[1-9][0-9]{0,8})'  # as `save` writes it; a step is an int32
_COMMITTED = 'commit_success.txt'  # what Orbax writes last on object stores
_UNFINISHED = '.orbax-checkpoint-tmp'  # what it names a step before it is one


def number(name: str) -> int | None:
  """The step that an entry is named for; None for '000120', '²', 'notes'."""
  return int(name) if re.fullmatch(_STEP, name) else None


def was_step(name: str) -> bool:
  """Whether a name is a step's, or one's that was set aside."""
  return re.fullmatch(rf'{_STEP}(\.bad[0-9]*)?', name) is not None


def check_path(path: epath.Path) -> None:
  """Refuses names that Orbax would take for patterns.

  It looks for the parts of a checkpoint by a pattern with the whole path in
  it; where that finds nothing, a save succeeds and cannot be read again.

  Raises:
    UserError: there is such a character in the path.
  """
  found = sorted(set('[*?') & set(str(path)))
  if found:
    raise UserError(
      f'{path} has {" ".join(found)} in its name: Orbax, which writes the '
      'checkpoints, would take it for a pattern and lose parts of them. Give '
      'a path without [, * and ?.'
    )


def listing(path: epath.Path) -> set[str]:
  """The names in a directory; none if it is no directory.

  Raises:
    OSError: it may be one and cannot be listed.
  """
  try:
    return {entry.name for entry in path.iterdir()}
  except (FileNotFoundError, NotADirectoryError):
    return set()


def is_step(path: epath.Path) -> bool:
  """Whether a directory holds a step that was written to its end.

  Damage may have taken some of its items; two of them are enough to tell it
  from a directory of the user's.
  """
  names = listing(path)
  return len(names & set(items.NAMES)) >= 2 and (
    not is_remote(path) or _COMMITTED in names
  )


def committed(root: epath.Path) -> list[int]:
  """The steps in a directory, ascending.

  Raises:
    OSError: it cannot be listed.
  """
  named = (number(name) for name in listing(root))
  return sorted(
    step for step in named if step is not None and is_step(root / str(step))
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


def strangers(root: epath.Path) -> list[str]:
  """Entries that look like steps and are none: '7' with notes, '000120'."""
  steps = {str(step) for step in committed(root)}
  return sorted(
    name for name in listing(root) - steps if name.strip().isnumeric()
  )


def remove_unfinished(root: epath.Path) -> None:
  """Removes what saves that were killed have left behind."""
  for name in listing(root):
    path, is_ours = root / name, False
    if re.fullmatch(f'{_STEP}{re.escape(_UNFINISHED)}.*', name):
      is_ours = path.is_dir() and not os.path.islink(path)
    elif is_remote(root) and number(name) is not None:
      names = listing(path)  # written in place
      is_ours = '_CHECKPOINT_METADATA' in names and _COMMITTED not in names
    if is_ours:
      path.rmtree()


def make_room(root: epath.Path, step: int) -> None:
  """Checks that a step can be written, on the process that creates it.

  Raises:
    OSError: something is in the way, or nothing can be written.
  """
  path = root / str(step)
  if is_remote(root):
    names = listing(path)
    if names and '_CHECKPOINT_METADATA' not in names:
      raise _in_the_way(path)
    return
  if path.exists():
    if not path.is_dir() or listing(path):
      raise _in_the_way(path)
    path.rmdir()
  trial = root / f'{step}{_UNFINISHED}'
  if trial.exists():
    trial.rmtree()
  trial.mkdir()
  (trial / 'trial').write_bytes(bytes(4096))
  trial.rmtree()


def _in_the_way(path: epath.Path) -> OSError:
  return FileExistsError(
    f'{path} is in the way and no checkpoint of this program; move it away'
  )


def remove(root: epath.Path, step: int) -> None:
  """Deletes a step; what a kill leaves of it is no step any more."""
  path = root / str(step)
  if is_remote(root):
    (path / _COMMITTED).unlink()
  else:
    path = path.rename(root / f'{step}{_UNFINISHED}-removed')
  path.rmtree()


def set_aside(root: epath.Path, step: int) -> epath.Path:
  """Renames a step to `<step>.bad`, where no restore looks for it."""
  target, attempt = root / f'{step}.bad', 1
  while target.exists():
    target, attempt = root / f'{step}.bad{attempt}', attempt + 1
  return (root / str(step)).rename(target)
