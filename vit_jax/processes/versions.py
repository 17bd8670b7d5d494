"""Versions of packages and of this program, and the content of run.json."""

import datetime
import functools
import importlib.metadata
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'libtpu',
  'tensorflow-datasets',
  'ml-collections',
  'clu',
  'numpy',
)


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


def describe_run() -> dict[str, Any]:
  """Returns the content of `run.json`: versions, devices, command, time."""
  devices = jax.devices()
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': [sys.executable, *sys.orig_argv[1:]],
    'commit': commit(),
    'python': platform.python_version(),
    'packages': {name: package_version(name) for name in _PACKAGES},
    'platform': devices[0].platform,
    'device_kind': devices[0].device_kind,
    'num_devices': len(devices),
    'num_processes': jax.process_count(),
    'hostname': platform.node(),
  }
