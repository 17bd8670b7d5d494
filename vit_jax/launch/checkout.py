"""The commit that a launch installs."""

import pathlib
import subprocess
import sys

from vit_jax.errors import UserError

_SCRIPT = 'launch/tpu_vm.sh'  # only a checkout has it, not a package


def _git(root: pathlib.Path, *arguments: str) -> str | None:
  """Returns the output of git, or None if git fails or is not installed."""
  command = ['git', '-C', str(root), *arguments]
  try:
    done = subprocess.run(command, capture_output=True, text=True)
  except FileNotFoundError:
    return None
  return done.stdout.strip() if done.returncode == 0 else None


def commit(root: pathlib.Path) -> str:
  """Returns the newest commit, and logs whether there are uncommitted changes.

  Raises:
    UserError: the directory is not a git checkout.
  """
  found = _git(root, 'rev-parse', 'HEAD')
  if found is None or not (root / _SCRIPT).is_file():
    raise UserError(
      f'{root} is not a git checkout of this project. A launch installs a '
      'commit: clone the repository and launch from the clone.'
    )
  if _git(root, 'status', '--porcelain', '--untracked-files=no'):
    print('note: uncommitted changes are not installed', file=sys.stderr)
  return found


def check_config(root: pathlib.Path, commit: str, config: str) -> None:
  """Checks that the hosts will have the config.

  Args:
    root: the checkout.
    commit: the commit to install.
    config: value of --config, with or without an argument after a colon.

  Raises:
    UserError: the config is not in the commit.
  """
  file = pathlib.PurePath(config.partition(':')[0])
  if file.is_absolute() or not (root / file).is_file():
    raise UserError(
      f'--config is {config!r}; the hosts get the committed files of this '
      f'checkout, {root}. Give a path inside it, such as configs/l16_i21k.py.'
    )
  if _git(root, 'cat-file', '-e', f'{commit}:{file.as_posix()}') is None:
    raise UserError(
      f'--config is {config!r}, which is not in commit {commit[:12]}, the one '
      'that the hosts get: commit it first.'
    )
