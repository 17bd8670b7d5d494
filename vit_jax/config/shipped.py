"""The configs that come with the package, in a checkout or installed."""

import pathlib

import vit_jax

_PACKAGE = pathlib.Path(vit_jax.__file__).parent


def directory() -> pathlib.Path:
  """Where they are: beside the package in a checkout, else within it."""
  installed = _PACKAGE / 'shipped' / 'configs'  # put there by setup.py
  return installed if installed.is_dir() else _PACKAGE.parent / 'configs'


def find(path: str) -> pathlib.Path:
  """The file of a config's path; `configs/…` also where no checkout is.

  What lies in the working directory comes first.
  """
  given = pathlib.Path(path).expanduser()
  if given.exists() or given.parts[:1] != ('configs',):
    return given
  here = directory().joinpath(*given.parts[1:])
  return here if here.exists() else given


def paths() -> list[str]:
  """Of all that come along, as `find` takes them."""
  root = directory()
  return [
    f'configs/{file.relative_to(root).as_posix()}'
    for file in sorted(root.rglob('*.py'))
  ]
