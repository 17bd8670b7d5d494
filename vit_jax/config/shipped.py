"""Finds the files that come with the package, in a checkout or installed."""

import pathlib

import vit_jax

_PACKAGE = pathlib.Path(vit_jax.__file__).parent


def directory(name: str = 'configs') -> pathlib.Path:
  """Returns the path of configs/ or launch/, installed or in a checkout."""
  installed = _PACKAGE / 'shipped' / name  # setup.py copies it there
  return installed if installed.is_dir() else _PACKAGE.parent / name


def find(path: str) -> pathlib.Path:
  """Returns the file of a config, also for `configs/…` without a checkout.

  A file in the working directory has precedence over a shipped one.
  """
  file = pathlib.Path(path).expanduser()
  if file.exists() or file.parts[:1] != ('configs',):
    return file
  shipped = directory().joinpath(*file.parts[1:])
  return shipped if shipped.exists() else file


def paths() -> list[str]:
  """Returns the paths of all shipped configs, as `find` accepts them."""
  root = directory()
  return [
    f'configs/{file.relative_to(root).as_posix()}'
    for file in sorted(root.rglob('*.py'))
  ]
