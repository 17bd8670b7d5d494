"""Finds the commit to install, and checks that it contains the config."""

import pathlib
import subprocess
import sys

from vit_jax.errors import UserError

_SCRIPT = 'launch/tpu_vm.sh'  # exists in a checkout, but not in the package


def _git(root: pathlib.Path, *arguments: str) -> str | None:
  """Returns the output of git, or None if git fails or is not installed."""
  command = ['git', '-C', str(root), *arguments]
  try:
    process = subprocess.run(command, capture_output=True, text=True)
  except FileNotFoundError:
    return None
  return process.stdout.strip() if process.returncode == 0 else None


def commit(root: pathlib.Path) -> str:
  """Returns the current commit, and prints a note about uncommitted changes.

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
  """Checks that the commit contains the config.

  Args:
    root: directory of the checkout.
    commit: commit to install.
    config: value of --config, with or without an argument after a colon.

  Raises:
    UserError: the config is not in the commit.
  """
  file = pathlib.PurePath(config.partition(':')[0])
  if file.is_absolute() or not (root / file).is_file():
    raise UserError(
      f'--config is {config!r}, but only committed files of this checkout, '
      f'{root}, are installed on the hosts. Give a path inside it, such as '
      'configs/l16_i21k.py.'
    )
  if _git(root, 'cat-file', '-e', f'{commit}:{file.as_posix()}') is None:
    raise UserError(
      f'--config is {config!r}, which is not in the commit that is installed '
      f'on the hosts, {commit[:12]}: commit it first.'
    )
