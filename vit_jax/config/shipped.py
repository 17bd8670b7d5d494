"""The configs that come with the package, in a checkout or installed."""

import pathlib

import vit_jax

_PACKAGE = pathlib.Path(vit_jax.__file__).parent


def directory() -> pathlib.Path:
  """Returns the directory of the configs, in a checkout or in the package."""
  installed = _PACKAGE / 'shipped' / 'configs'  # put there by setup.py
  return installed if installed.is_dir() else _PACKAGE.parent / 'configs'


def find(path: str) -> pathlib.Path:
  """Returns the file of a config's path; `configs/…` works without a checkout.

  Files in the working directory come first.
  """
  given = pathlib.Path(path).expanduser()
  if given.exists() or given.parts[:1] != ('configs',):
    return given
  here = directory().joinpath(*given.parts[1:])
  return here if here.exists() else given


def paths() -> list[str]:
  """Returns the paths of all shipped configs, as `find` accepts them."""
  root = directory()
  return [
    f'configs/{file.relative_to(root).as_posix()}'
    for file in sorted(root.rglob('*.py'))
  ]
