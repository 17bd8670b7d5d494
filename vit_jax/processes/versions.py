"""Returns the versions of this package and of the packages that it uses."""

import functools
import importlib.metadata
import pathlib
import subprocess

_ROOT = pathlib.Path(__file__).parents[1]


def package_version(name: str) -> str | None:
  """Returns the version of a package; None if it is not installed."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


@functools.cache
def commit() -> str | None:
  """Returns the commit of this package, with '+' if files were changed.

  Returns:
    The commit; None if neither git nor `git archive` provides it.
  """

  def git(*arguments: str) -> str:
    return subprocess.run(
      ['git', '-C', str(_ROOT), *arguments],
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  try:
    archived = (_ROOT / 'commit.txt').read_text().strip()
    if not archived.startswith('$'):  # `git archive` wrote the commit there
      return archived
    changed = git('status', '--porcelain', '--untracked-files=no')
    return git('rev-parse', 'HEAD') + ('+' if changed else '')
  except (OSError, subprocess.CalledProcessError):
    return None
